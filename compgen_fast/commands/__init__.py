"""The commands of `cgf` as typed options, by what they are about. Importing them does not import torch."""
