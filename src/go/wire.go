package kvatlas

import (
	"bytes"
	"fmt"

	"github.com/vmihailenco/msgpack/v5"
)

const (
	protocolVersion = 1

	errorHeader     = "Nats-Service-Error"
	errorCodeHeader = "Nats-Service-Error-Code"
)

// A LineageHash is position, parent and content of a block in 128 bits, big-endian.
type LineageHash [16]byte

// A Cursor is the number of a batch: the publisher's incarnation, and the count in it.
type Cursor struct{ Epoch, Seq uint64 }

// Reaches says whether a holder at this cursor has what it had at the other one.
func (c Cursor) Reaches(other Cursor) bool {
	return c.Epoch > other.Epoch || c.Epoch == other.Epoch && c.Seq >= other.Seq
}

// fields are a map of the contract that is about to be encoded.
type fields map[string]interface{}

// encode makes a payload of a map. Numbers take as few bytes as they can.
func encode(value interface{}) ([]byte, error) {
	var payload bytes.Buffer
	encoder := msgpack.NewEncoder(&payload)
	encoder.UseCompactInts(true)
	if err := encoder.Encode(value); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrInvalid, err)
	}
	return payload.Bytes(), nil
}

// decode reads the one map that a payload is.
func decode(payload []byte, into interface{}) error {
	reader := bytes.NewReader(payload)
	if err := msgpack.NewDecoder(reader).Decode(into); err != nil {
		return fmt.Errorf("%w: %v", ErrUndecodable, err)
	}
	if reader.Len() > 0 {
		return fmt.Errorf("%w: %d bytes follow the map", ErrUndecodable, reader.Len())
	}
	return nil
}
