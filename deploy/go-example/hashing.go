package main

import (
	"encoding/binary"
)

// The hash contract: see "Hashes" in deploy/wire-contract.md.

const (
	baseSeed  = 1337
	blockSize = 16
)

// cacheSeed is the seed of the block hashes of one cache. An empty name adds nothing.
func cacheSeed(loraName, cacheSalt string) uint64 {
	seed := uint64(baseSeed)
	if loraName != "" {
		seed += xxh3([]byte(loraName), 0)
	}
	if cacheSalt != "" {
		seed += xxh3([]byte(cacheSalt), 1)
	}
	return seed
}

// blockHashes are the hashes of every whole block. A tail that does not fill a block has none.
func blockHashes(tokens []uint32, size int, seed uint64) []uint64 {
	hashes := []uint64{}
	for ; len(tokens) >= size; tokens = tokens[size:] {
		encoded := make([]byte, 0, 4*size)
		for _, token := range tokens[:size] {
			encoded = binary.LittleEndian.AppendUint32(encoded, token)
		}
		hashes = append(hashes, xxh3(encoded, seed))
	}
	return hashes
}

// sequenceHashes are the rolling hashes of the prefixes up to and including each block.
func sequenceHashes(blocks []uint64) []uint64 {
	chain := []uint64{}
	for index, block := range blocks {
		if index > 0 {
			block = xxh3(blob([]uint64{chain[index-1], block}), baseSeed)
		}
		chain = append(chain, block)
	}
	return chain
}

// blob is a list of hashes as the contract carries it: 8 bytes each, little-endian.
func blob(hashes []uint64) []byte {
	encoded := make([]byte, 0, 8*len(hashes))
	for _, hash := range hashes {
		encoded = binary.LittleEndian.AppendUint64(encoded, hash)
	}
	return encoded
}
