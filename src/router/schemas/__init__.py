"""Request and response bodies of the HTTP routes. No behaviour: types, defaults and documentation."""
