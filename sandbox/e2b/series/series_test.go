package series

import (
	"fmt"
	"testing"
	"time"
)

func TestHistory_reaches_back_to_its_beginning_however_long_it_gets(t *testing.T) {
	at := time.Unix(1000, 0)
	for name, tt := range map[string]struct {
		rounds, samples int
		every           time.Duration
	}{
		"a short one has every sample": {rounds: 100, samples: 100, every: Every},
		"a full one is complete":       {rounds: MaxSamples, samples: MaxSamples, every: Every},
		"one more halves it":           {rounds: MaxSamples + 1, samples: MaxSamples/2 + 1, every: 2 * Every},
		"a day has one in 11 minutes":  {rounds: 24 * 720, samples: 135, every: 128 * Every},
		"a month has one in 6 hours":   {rounds: 30 * 24 * 720, samples: 127, every: 4096 * Every},
	} {
		var h history
		for i := range tt.rounds {
			h.keep(Sample{Timestamp: at.Add(time.Duration(i) * Every)})
		}
		if len(h.samples) != tt.samples || h.every != tt.every || !h.samples[0].Timestamp.Equal(at) {
			t.Errorf("%s: %d samples every %v from %v on", name, len(h.samples), h.every, h.samples[0].Timestamp)
		}
		for i := range h.samples[1:] {
			if gap := h.samples[i+1].Timestamp.Sub(h.samples[i].Timestamp); gap != h.every {
				t.Errorf("%s: %v between two samples, want %v", name, gap, h.every)
			}
		}
	}
	var h history
	for i := range 100 { // whoever asks often adds none
		h.keep(Sample{Timestamp: at.Add(time.Duration(i) * 10 * time.Millisecond)})
	}
	if len(h.samples) != 1 {
		t.Errorf("%d samples of a second", len(h.samples))
	}
}

func TestStore_counts_processors_since_the_last_sample(t *testing.T) {
	var s Store
	at := time.Unix(1000, 0)
	for i, tt := range []struct {
		used CPU
		want float64
	}{
		{CPU{Busy: 100, Idle: 300}, 50}, {CPU{Busy: 200, Idle: 300}, 200}, {CPU{Busy: 200, Idle: 700}, 0},
		{CPU{Busy: 10, Idle: 30}, 50}, // it has booted
	} {
		if got := s.Add("a", Sample{CPUs: 2, Timestamp: at.Add(time.Duration(i) * Every)}, tt.used).CPU; got != tt.want {
			t.Errorf("sample %d: %v, want %v", i, got, tt.want)
		}
	}
	if got := s.Between("a", at.Add(Every), at.Add(2*Every)); len(got) != 2 || got[0].CPU != 200 {
		t.Errorf("a part: %v", got)
	}
	s.Retain(map[string]bool{"b": true})
	if got := s.Between("a", at, at.Add(time.Hour)); len(got) != 0 || len(s.by) != 0 {
		t.Errorf("of a sandbox that is gone: %v", got)
	}
	for i := range MaxHistories + 10 {
		s.Add(fmt.Sprint(i), Sample{}, CPU{})
	}
	if len(s.by) != MaxHistories {
		t.Errorf("%d histories", len(s.by))
	}
}
