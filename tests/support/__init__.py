"""What the tests run against: servers, ports and stores that are not ours."""
