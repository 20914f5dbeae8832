"""x.add_(y), x += y and their like: the out-of-place rule, written back where nothing else shares the memory."""

from typing import Any

from torch import Tensor

from compgen_fast.jets.jet import RULES, Rule, jet_rule
from compgen_fast.jets.rules.stores import stored


def _written_back(rule: Rule) -> Rule:
    def in_place(x: Any, *args: Any, **kwargs: Any) -> Any:
        return stored(x, rule(x, *args, **kwargs))

    return in_place


OPERATORS = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__ipow__": "pow"}

for _name in dir(Tensor):
    _out_of_place = OPERATORS.get(_name, _name[:-1] if _name.endswith("_") and not _name.endswith("__") else "")
    _rule = RULES.get(getattr(Tensor, _out_of_place)) if hasattr(Tensor, _out_of_place) else None
    if _rule is not None and getattr(Tensor, _name) not in RULES:
        jet_rule(getattr(Tensor, _name))(_written_back(_rule))


@jet_rule(Tensor.__setitem__, Tensor.copy_, Tensor.index_copy_, Tensor.index_add_, Tensor.scatter_, Tensor.scatter_add_)
def refuse(x: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "jets: x[i] = y writes a jet into part of a tensor; build it whole with torch.stack, torch.cat or torch.where"
    )
