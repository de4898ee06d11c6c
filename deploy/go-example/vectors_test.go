package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

type vectors struct {
	Hashes []struct {
		Name           string   `json:"name"`
		Tokens         []uint32 `json:"tokens"`
		BlockSize      int      `json:"block_size"`
		LoraName       string   `json:"lora_name"`
		CacheSalt      string   `json:"cache_salt"`
		Seed           string   `json:"seed"`
		BlockHashes    []string `json:"block_hashes"`
		SequenceHashes []string `json:"sequence_hashes"`
	} `json:"hashes"`
	QueryReplies []struct {
		Name    string `json:"name"`
		Payload string `json:"payload"`
		Meaning struct {
			QueryBlocks int `json:"query_blocks"`
			Holders     []struct {
				Worker        string            `json:"worker"`
				MatchedBlocks int               `json:"matched_blocks"`
				UsableBlocks  int               `json:"usable_blocks"`
				Exact         bool              `json:"exact"`
				Address       string            `json:"address"`
				Labels        map[string]string `json:"labels"`
			} `json:"holders"`
		} `json:"meaning"`
	} `json:"query_replies"`
}

func read(t *testing.T) vectors {
	text, err := os.ReadFile("../test-vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var found vectors
	if err := json.Unmarshal(text, &found); err != nil {
		t.Fatal(err)
	}
	return found
}

func digits(hashes []uint64) []string {
	texts := []string{}
	for _, hash := range hashes {
		texts = append(texts, fmt.Sprintf("%016x", hash))
	}
	return texts
}

func TestHashesAreTheContracts(t *testing.T) {
	for _, vector := range read(t).Hashes {
		seed := cacheSeed(vector.LoraName, vector.CacheSalt)
		blocks := blockHashes(vector.Tokens, vector.BlockSize, seed)
		found := fmt.Sprint(digits([]uint64{seed}), digits(blocks), digits(sequenceHashes(blocks)))
		expected := fmt.Sprint([]string{vector.Seed}, vector.BlockHashes, vector.SequenceHashes)
		if found != expected {
			t.Errorf("%s: found %s, expected %s", vector.Name, found, expected)
		}
	}
}

func TestRepliesAreRead(t *testing.T) {
	for _, vector := range read(t).QueryReplies {
		payload, err := hex.DecodeString(vector.Payload)
		if err != nil {
			t.Fatal(err)
		}
		var found reply
		if err := msgpack.Unmarshal(payload, &found); err != nil {
			t.Fatalf("%s: %v", vector.Name, err)
		}
		if found.QueryBlocks != vector.Meaning.QueryBlocks || len(found.Holders) != len(vector.Meaning.Holders) {
			t.Fatalf("%s: found %+v", vector.Name, found)
		}
		for index, expected := range vector.Meaning.Holders {
			holder := found.Holders[index]
			if holder.Worker != expected.Worker || holder.MatchedBlocks != expected.MatchedBlocks ||
				holder.usable() != expected.UsableBlocks || holder.Exact != expected.Exact ||
				holder.Address != expected.Address || len(holder.Labels) != len(expected.Labels) {
				t.Errorf("%s: found %+v, expected %+v", vector.Name, holder, expected)
			}
			for key, value := range expected.Labels {
				if holder.Labels[key] != value {
					t.Errorf("%s: found labels %v, expected %v", vector.Name, holder.Labels, expected.Labels)
				}
			}
		}
	}
}
