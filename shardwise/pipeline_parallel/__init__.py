"""Pipeline parallelism: schedules as data, stages, and the runner that executes them."""
