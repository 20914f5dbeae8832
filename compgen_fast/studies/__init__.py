"""The papers as runnable studies, each ending in results.json and a report page. `compgen study` starts them."""
