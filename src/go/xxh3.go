package kvatlas

import (
	"encoding/binary"
	"math/bits"
)

// XXH3 with 64 bits and a seed, by Yann Collet: https://github.com/Cyan4973/xxHash. It is here and not a dependency, because
// Debian has no package of it for Go.

const (
	prime32x1 = 0x9E3779B1
	prime32x2 = 0x85EBCA77
	prime32x3 = 0xC2B2AE3D
	prime64x1 = 0x9E3779B185EBCA87
	prime64x2 = 0xC2B2AE3D27D4EB4F
	prime64x3 = 0x165667B19E3779F9
	prime64x4 = 0x85EBCA77C2B2AE63
	prime64x5 = 0x27D4EB2F165667C5

	stripe         = 64
	stripesInBlock = (len(secret) - stripe) / 8
)

var secret = [192]byte{
	0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
	0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
	0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
	0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
	0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
	0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
	0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
	0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
	0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
	0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
	0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
	0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
}

func le32(b []byte) uint64 { return uint64(binary.LittleEndian.Uint32(b)) }

func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

func fold(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	return high ^ low
}

func avalanche(h uint64) uint64 {
	h = (h ^ h>>37) * 0x165667919E3779F9
	return h ^ h>>32
}

func avalanche64(h uint64) uint64 {
	h = (h ^ h>>33) * prime64x2
	h = (h ^ h>>29) * prime64x3
	return h ^ h>>32
}

func xxh3(in []byte, seed uint64) uint64 {
	switch {
	case len(in) <= 16:
		return upTo16(in, seed)
	case len(in) <= 128:
		return upTo128(in, seed)
	case len(in) <= 240:
		return upTo240(in, seed)
	default:
		return long(in, seed)
	}
}

func upTo16(in []byte, seed uint64) uint64 {
	size := uint64(len(in))
	switch {
	case size > 8:
		low := le64(in) ^ ((le64(secret[24:]) ^ le64(secret[32:])) + seed)
		high := le64(in[size-8:]) ^ ((le64(secret[40:]) ^ le64(secret[48:])) - seed)
		return avalanche(size + bits.ReverseBytes64(low) + high + fold(low, high))
	case size >= 4:
		seed ^= uint64(bits.ReverseBytes32(uint32(seed))) << 32
		h := (le32(in[size-4:]) + le32(in)<<32) ^ ((le64(secret[8:]) ^ le64(secret[16:])) - seed)
		h ^= bits.RotateLeft64(h, 49) ^ bits.RotateLeft64(h, 24)
		h *= 0x9FB21C651E98DF25
		h = (h ^ (h>>35 + size)) * 0x9FB21C651E98DF25
		return h ^ h>>28
	case size > 0:
		joined := uint64(in[0])<<16 | uint64(in[size>>1])<<24 | uint64(in[size-1]) | size<<8
		return avalanche64(joined ^ ((le32(secret[0:]) ^ le32(secret[4:])) + seed))
	default:
		return avalanche64(seed ^ le64(secret[56:]) ^ le64(secret[64:]))
	}
}

func mix(in, key []byte, seed uint64) uint64 {
	return fold(le64(in)^(le64(key)+seed), le64(in[8:])^(le64(key[8:])-seed))
}

func upTo128(in []byte, seed uint64) uint64 {
	h := uint64(len(in)) * prime64x1
	for pair := (len(in) - 1) / 32; pair >= 0; pair-- {
		h += mix(in[16*pair:], secret[32*pair:], seed)
		h += mix(in[len(in)-16*(pair+1):], secret[32*pair+16:], seed)
	}
	return avalanche(h)
}

func upTo240(in []byte, seed uint64) uint64 {
	h := uint64(len(in)) * prime64x1
	for round := 0; round < 8; round++ {
		h += mix(in[16*round:], secret[16*round:], seed)
	}
	h = avalanche(h)
	for round := 8; round < len(in)/16; round++ {
		h += mix(in[16*round:], secret[16*(round-8)+3:], seed)
	}
	return avalanche(h + mix(in[len(in)-16:], secret[136-17:], seed))
}

func long(in []byte, seed uint64) uint64 {
	var key [len(secret)]byte
	for at := 0; at < len(secret); at += 16 {
		binary.LittleEndian.PutUint64(key[at:], le64(secret[at:])+seed)
		binary.LittleEndian.PutUint64(key[at+8:], le64(secret[at+8:])-seed)
	}
	acc := [8]uint64{
		prime32x3, prime64x1, prime64x2, prime64x3, prime64x4, prime32x2, prime64x5, prime32x1,
	}
	stripes := (len(in) - 1) / stripe
	for number := 0; number < stripes; number++ {
		accumulate(&acc, in[number*stripe:], key[8*(number%stripesInBlock):])
		if number%stripesInBlock == stripesInBlock-1 {
			scramble(&acc, key[len(key)-stripe:])
		}
	}
	accumulate(&acc, in[len(in)-stripe:], key[len(key)-stripe-7:])
	h := uint64(len(in)) * prime64x1
	for at := 0; at < len(acc); at += 2 {
		h += fold(acc[at]^le64(key[11+8*at:]), acc[at+1]^le64(key[19+8*at:]))
	}
	return avalanche(h)
}

func accumulate(acc *[8]uint64, in, key []byte) {
	for lane := range acc {
		value := le64(in[8*lane:])
		keyed := value ^ le64(key[8*lane:])
		acc[lane^1] += value
		acc[lane] += keyed & 0xFFFFFFFF * (keyed >> 32)
	}
}

func scramble(acc *[8]uint64, key []byte) {
	for lane := range acc {
		acc[lane] = (acc[lane] ^ acc[lane]>>47 ^ le64(key[8*lane:])) * prime32x1
	}
}
