package main

import (
	"encoding/json"
	"os"
	"testing"
)

func TestAllExamplesChooseAlike(t *testing.T) {
	text, err := os.ReadFile("../router-example/choices.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Engines    []string       `json:"engines"`
		FirstToken uint32         `json:"first_token"`
		Tokens     int            `json:"tokens"`
		Blocks     int            `json:"blocks"`
		Usable     map[string]int `json:"usable"`
		UnderWay   map[string]int `json:"under_way"`
		Chosen     string         `json:"chosen"`
		ToCompute  int            `json:"to_compute"`
	}
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 100 {
		t.Fatalf("%d cases are too few", len(cases))
	}
	for _, each := range cases {
		tokens := make([]uint32, each.Tokens)
		for index := range tokens {
			tokens[index] = each.FirstToken + uint32(index)
		}
		chosen, toCompute := choose(each.Engines, tokens, each.Blocks, each.Usable, each.UnderWay)
		if chosen != each.Chosen || toCompute != each.ToCompute {
			t.Errorf("%+v: %s, %d", each, chosen, toCompute)
		}
	}
}
