"""The papers as runnable studies, each ending in results.json and a report page. `cgf study` starts them."""
