"""The router alone: what it costs and how fast it is, with nothing behind it that computes.

| Process | What it is |
|---|---|
| shard | `null_shard`: a real gRPC server whose steps cost nothing, or take an exact time |
| router | `python -m router`, as the launcher starts it |
| client | `client`: counts events on bare sockets, in a process of its own |

`python -m benchmarks.router` prints a table and writes `benchmarks/results/router.json`.
"""
