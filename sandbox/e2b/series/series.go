// Package series keeps what is measured of sandboxes, again and again, in bounded memory.
package series

import (
	"sync"
	"time"
)

// Sample is what a sandbox used at a moment, as its guest counts it and E2B's wire says it. Sizes are in bytes.
type Sample struct {
	Timestamp time.Time `json:"timestamp"`
	Unix      int64     `json:"timestampUnix"`
	CPUs      int       `json:"cpuCount"`
	CPU       float64   `json:"cpuUsedPct"` // of one CPU
	MemUsed   uint64    `json:"memUsed"`
	MemTotal  uint64    `json:"memTotal"`
	MemCache  uint64    `json:"memCache"`
	DiskUsed  uint64    `json:"diskUsed"`
	DiskTotal uint64    `json:"diskTotal"`
}

// CPU is the processor time of a guest since its boot, in milliseconds of all its CPUs.
type CPU struct{ Busy, Idle float64 }

const (
	// Every is the time between samples that are kept at first.
	Every = 5 * time.Second
	// MaxSamples bounds the history of a sandbox. A full one loses every second sample, and takes half as many from then
	// on: so it reaches back to its beginning.
	MaxSamples = 240
	// MaxHistories bounds the sandboxes.
	MaxHistories = 4096
)

// history is that of one sandbox.
type history struct {
	last    CPU
	every   time.Duration // between samples
	samples []Sample
}

func (h *history) keep(m Sample) {
	h.every = max(h.every, Every)
	// Half of it more: rounds are not exact.
	if n := len(h.samples); n > 0 && m.Timestamp.Sub(h.samples[n-1].Timestamp) < h.every-Every/2 {
		return
	}
	if len(h.samples) == MaxSamples {
		for i := range MaxSamples / 2 {
			h.samples[i] = h.samples[2*i]
		}
		h.samples, h.every = h.samples[:MaxSamples/2], 2*h.every
	}
	h.samples = append(h.samples, m)
}

// Store has the histories of sandboxes, by ids that are not used again. Its methods may be called from any goroutine.
// The zero value is empty.
type Store struct {
	mu sync.Mutex // guards by
	by map[string]*history
}

// Add adds a sample, unless the last one is too young, and returns it with the use of processors since the last one, or
// since the boot.
func (s *Store) Add(id string, m Sample, used CPU) Sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.by[id]
	if h == nil {
		if h = (&history{}); len(s.by) < MaxHistories {
			if s.by == nil {
				s.by = map[string]*history{}
			}
			s.by[id] = h
		}
	}
	busy, idle := used.Busy-h.last.Busy, used.Idle-h.last.Idle
	if busy < 0 || idle < 0 { // it has booted since
		busy, idle = used.Busy, used.Idle
	}
	if all := busy + idle; all > 0 {
		m.CPU = float64(int(busy/all*100*100*float64(max(m.CPUs, 1)))) / 100
	}
	h.last = used
	h.keep(m)
	return m
}

// Between returns the samples from one time to another, both included, in their order.
func (s *Store) Between(id string, start, end time.Time) []Sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []Sample{}
	if h := s.by[id]; h != nil {
		for _, m := range h.samples {
			if !m.Timestamp.Before(start) && !m.Timestamp.After(end) {
				out = append(out, m)
			}
		}
	}
	return out
}

// Retain drops the histories of all sandboxes but these.
func (s *Store) Retain(ids map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.by {
		if !ids[id] {
			delete(s.by, id)
		}
	}
}
