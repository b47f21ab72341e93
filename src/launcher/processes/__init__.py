"""Child processes: started, watched, stopped; their logs; what ends them if the launcher is killed."""
