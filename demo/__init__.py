"""The demo: real flights, three producers, kill -9, lost receipts; then the topic is compared with the source."""
