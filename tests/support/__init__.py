"""What the tests share: servers, stores to test on, programs that tests start and kill."""
