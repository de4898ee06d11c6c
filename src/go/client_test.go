package kvatlas

import (
	"testing"
	"time"
)

func TestNobodyMayListenForAWhileOnEachLink(t *testing.T) {
	var nobody nobodyPeriod
	begun := time.Now()
	for _, heard := range []struct {
		link  uint64
		after time.Duration
		lasts bool
	}{
		{1, 5000, true}, {1, 5999, true}, {1, 6000, false}, {2, 7000, true}, {2, 7999, true}, {2, 8000, false},
	} {
		lasts := nobody.lasts(heard.link, begun.Add(heard.after*time.Millisecond), nobodyParts*time.Second)
		same(t, "what is sent again", lasts, heard.lasts)
	}
}
