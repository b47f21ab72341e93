"""What will be started, decided before anything is: the model, the machine, the resolved plan, command lines."""
