"""Support of the tests: servers, brokers, stores with faults, clocks, histories."""
