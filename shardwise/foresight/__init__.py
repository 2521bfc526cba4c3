"""What a job will need and take, before it starts."""
