package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
)

// homeTokensMax is the most tokens that decide a prompt's home: more than the system prompt, which most prompts share.
const homeTokensMax = 1024

// knownToleranceDivisor: where something is known, engines within a tenth of the prompt's own cost above the cheapest are equals.
const knownToleranceDivisor = 10

// homeKey is the hash of the first tokens, which decide the prompt's home. Their number is a power of two: so a short
// conversation keeps its home over most turns.
func homeKey(tokens []uint32) []byte {
	decisive := len(tokens)
	if decisive > homeTokensMax {
		decisive = homeTokensMax
	}
	decisive = 1 << bits.Len(uint(decisive)) >> 1
	encoded := make([]byte, 4*decisive)
	for index, token := range tokens[:decisive] {
		binary.LittleEndian.PutUint32(encoded[4*index:], token)
	}
	key := sha256.Sum256(encoded)
	return key[:]
}

// homeScore is the engine's score for prompts with this key: the same in every router. The highest is the home.
func homeScore(engine string, key []byte) []byte {
	score := sha256.Sum256(append(append([]byte(engine), 0), key...))
	return score[:]
}

// choose returns the engine for a prompt of so many blocks, and how many of them it has to compute: by what is cached, by load,
// and among equals by a home. The name is empty where there are no engines. It needs nothing else: copy it.
// deploy/router-example/README.md says why.
//
// usable says how many of them each engine need not compute, as far as that is known. underWay says how many blocks each
// engine has to compute for other prompts.
func choose(engines []string, tokens []uint32, blocks int, usable, underWay map[string]int) (chosen string, toCompute int) {
	missing := func(engine string) int {
		if usable[engine] >= blocks {
			return 0
		}
		return blocks - usable[engine]
	}
	cost := func(engine string) int { return missing(engine) + underWay[engine] }
	// Where nothing is known, the home has a good chance to have all of it.
	divisor, least := 1, 0
	for index, engine := range engines {
		if usable[engine] > 0 {
			divisor = knownToleranceDivisor
		}
		if index == 0 || cost(engine) < least {
			least = cost(engine)
		}
	}
	key := homeKey(tokens)
	var best []byte
	for _, engine := range engines {
		// In parts of a block, so that nothing is rounded.
		if cost(engine)*divisor > least*divisor+blocks {
			continue
		}
		if score := homeScore(engine, key); best == nil || bytes.Compare(score, best) > 0 {
			chosen, best = engine, score
		}
	}
	return chosen, missing(chosen)
}
