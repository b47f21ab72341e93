"""What bodies of several families share: types, defaults and documentation. No behaviour."""
