"""Request and response bodies of the HTTP door. No behaviour: types, defaults and documentation."""
