"""`launcher models`, `pull` and `rm`: the models in the hub cache of this machine."""
