package kvatlas

import "testing"

func TestAHashThatMovesLeavesADoubt(t *testing.T) {
	for name, moves := range map[string]Stored{
		"to another parent":   {Position: 1, Parent: 8, SequenceHashes: []uint64{9}},
		"to another position": {Position: 2, Parent: 7, SequenceHashes: []uint64{9}},
	} {
		held := newTable(100)
		for _, event := range []Event{Stored{SequenceHashes: []uint64{7, 9}}, Stored{SequenceHashes: []uint64{7, 9}}} {
			made := changed(t, event)
			held.apply(&made)
		}
		same(t, "what is stored again "+name, held.isShort, false)
		made := changed(t, moves)
		held.apply(&made)
		same(t, "what moves "+name, held.isShort, true)
		cleared := changed(t, Cleared{})
		held.apply(&cleared)
		same(t, "nothing "+name, held.isShort, false)
	}
}
