"""Several models at one address: who is loaded, and the processes of each."""
