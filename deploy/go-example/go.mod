module kvatlas.example

go 1.19

require (
	github.com/nats-io/nats.go v1.22.1
	github.com/vmihailenco/msgpack/v5 v5.3.5
)
