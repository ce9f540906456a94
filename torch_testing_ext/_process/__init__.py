"""What any process that we start needs: start-up, signals, messages, an event loop, the wording of its end."""
