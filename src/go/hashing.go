package kvatlas

import (
	"encoding/binary"
	"fmt"
)

// The hash contract: see "Hashes" in deploy/wire-contract.md.

const (
	// BaseSeed is the seed of every hash, before the names of adapter and salt enter it.
	BaseSeed = 1337
	// DefaultBlockSize is the number of tokens in a block unless a namespace says otherwise.
	DefaultBlockSize = 16
	// PositionMax is the last position in a sequence that a block can have.
	PositionMax = 1<<24 - 1

	blockSizeMax = 1 << 16
)

// CacheSeed is the seed of the block hashes of one cache. An empty name adds nothing.
func CacheSeed(loraName, cacheSalt string) uint64 {
	seed := uint64(BaseSeed)
	if loraName != "" {
		seed += xxh3([]byte(loraName), 0)
	}
	if cacheSalt != "" {
		seed += xxh3([]byte(cacheSalt), 1)
	}
	return seed
}

// BlockHashes are the hashes of every whole block of a prompt. A tail that does not fill a block has none; a size below 1 makes no blocks.
func BlockHashes(tokens []uint32, blockSize int, seed uint64) []uint64 {
	if blockSize < 1 || len(tokens) < blockSize {
		return []uint64{}
	}
	hashes := make([]uint64, 0, len(tokens)/blockSize)
	encoded := make([]byte, 0, 4*blockSize)
	for ; len(tokens) >= blockSize; tokens = tokens[blockSize:] {
		hashes = append(hashes, xxh3(appendTokens(encoded, tokens[:blockSize]), seed))
	}
	return hashes
}

// SequenceHashes are the rolling hashes of the prefixes up to and including each block, from position 0 on.
func SequenceHashes(blocks []uint64) []uint64 {
	if len(blocks) == 0 {
		return []uint64{}
	}
	return append([]uint64{blocks[0]}, ExtendSequence(blocks[0], blocks[1:])...)
}

// ExtendSequence are the rolling hashes of the blocks that follow the prefix with the sequence hash parent.
func ExtendSequence(parent uint64, blocks []uint64) []uint64 {
	chain := make([]uint64, 0, len(blocks))
	for _, block := range blocks {
		parent = xxh3(hashBlob([]uint64{parent, block}), BaseSeed)
		chain = append(chain, parent)
	}
	return chain
}

// ShardOf is the number of the shard, of so many, that knows a worker's blocks.
func ShardOf(worker string, shards int) (int, error) {
	if err := checkName("worker", worker); err != nil {
		return 0, err
	}
	if shards < 1 {
		return 0, fmt.Errorf("%w: %d shards", ErrInvalid, shards)
	}
	return int(xxh3([]byte(worker), BaseSeed) % uint64(shards)), nil
}

// hashBlob is a list of hashes as the contract carries it: 8 bytes each, little-endian.
func hashBlob(hashes []uint64) []byte {
	encoded := make([]byte, 0, 8*len(hashes))
	for _, hash := range hashes {
		encoded = binary.LittleEndian.AppendUint64(encoded, hash)
	}
	return encoded
}

// appendTokens appends a list of tokens or positions as the contract carries it: 4 bytes each, little-endian.
func appendTokens(encoded []byte, tokens []uint32) []byte {
	for _, token := range tokens {
		encoded = binary.LittleEndian.AppendUint32(encoded, token)
	}
	return encoded
}
