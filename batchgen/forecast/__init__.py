"""`batchgen plan`: what a job will compute and how long that will take, before it runs."""
