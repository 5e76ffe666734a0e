package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// movers is a host with VMs of which some cannot move.
type movers struct {
	place
	names    []string
	now, max atomic.Int64
}

func (m *movers) evacuees(context.Context) (list records.List, err error) {
	for _, name := range m.names {
		list.Sandboxes = append(list.Sandboxes, records.Sandbox{Name: name})
	}
	return list, nil
}

func (m *movers) Migrate(_ context.Context, name string, o spec.MigrateOptions) (spec.MigrateResult, error) {
	n := m.now.Add(1)
	defer m.now.Add(-1)
	for was := m.max.Load(); n > was && !m.max.CompareAndSwap(was, n); was = m.max.Load() {
	}
	time.Sleep(time.Millisecond) // so that others run at once
	if strings.HasPrefix(name, "stays") {
		return spec.MigrateResult{}, errors.New("it has volumes of its host")
	}
	return spec.MigrateResult{Name: name, To: o.To}, nil
}

func TestEvacuation_moves_some_at_a_time_and_names_what_stays(t *testing.T) {
	m := &movers{names: []string{"stays-b", "stays-a"}}
	for i := range 20 {
		m.names = append(m.names, fmt.Sprint("moves", i))
	}
	for _, format := range []string{"", "json"} {
		var out bytes.Buffer
		a := &app{stdout: &out, output: format}
		err := a.evacuate(t.Context(), m, spec.MigrateOptions{To: "b"})
		if err == nil || err.Error() != "stays-a stays: it has volumes of its host\nstays-b stays: it has volumes of its host" {
			t.Error(err)
		}
		if m.max.Load() > moversAtOnce || m.max.Load() < 2 {
			t.Errorf("%d move at once", m.max.Load())
		}
		var doc evacuated
		if format == "json" {
			if err := json.Unmarshal(out.Bytes(), &doc); err != nil || len(doc.Moved) != 20 || len(doc.Stayed) != 2 || doc.Stayed[0].Name != "stays-a" {
				t.Errorf("%s: %v", out.String(), err)
			}
		} else if n := strings.Count(out.String(), " runs on b: "); n != 20 {
			t.Errorf("%d lines: %s", n, out.String())
		}
	}
}
