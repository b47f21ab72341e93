"""Several schedulers, each with shards of its own, behind the operations of one."""
