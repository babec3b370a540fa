"""What a person should run: the settings of real engines that are fastest on their machine, found by simulation."""
