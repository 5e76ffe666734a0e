package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

func parsePolicy(t *testing.T, text string) *netpolicy.Policy {
	t.Helper()
	p, err := netpolicy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// hugePolicy returns a policy larger than a label can be.
func hugePolicy(t *testing.T) *netpolicy.Policy {
	t.Helper()
	var b strings.Builder
	b.WriteString("rules:\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "  - {name: \"größe %d äöüß\", direction: egress, verdict: allow, cidrs: [20.%d.%d.0/24], protocols: [tcp], ports: [%d]}\n", i, i/256, i%256, i+1)
	}
	return parsePolicy(t, b.String())
}

func TestPolicyLabels_give_the_policy_back_or_an_error(t *testing.T) {
	for name, p := range map[string]*netpolicy.Policy{
		"none": nil, "empty": {}, "huge": hugePolicy(t),
		"small": parsePolicy(t, "rules: [{direction: egress, verdict: allow, groups: [public], protocols: [tcp], ports: [443]}]"),
	} {
		r := &state.Record{ID: "x", Spec: Spec{Name: "a", Network: spec.NetworkTAP, Policy: p, Tags: []string{"db"}}}
		labels, err := statetest.TempStore(t).Labels(r, state.KindSleep)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(labels[state.LabelRecord], "rules") || r.Spec.Policy != p {
			t.Errorf("%s: the record has the policy as well: %s", name, labels[state.LabelRecord])
		}
		for k, v := range labels {
			if len(v) > 64<<10 {
				t.Errorf("%s: label %s has %d bytes", name, k, len(v))
			}
		}
		var record state.Record
		if err := json.Unmarshal([]byte(labels[state.LabelRecord]), &record); err != nil || !slices.Equal(record.Spec.Tags, r.Spec.Tags) {
			t.Errorf("%s: tags have become %q: %v", name, record.Spec.Tags, err)
		}
		got, err := state.PolicyOf(labels)
		if err != nil || (got == nil) != (p == nil) {
			t.Fatalf("%s: %v, %v", name, got, err)
		}
		want, _ := json.Marshal(p)
		if have, _ := json.Marshal(got); string(have) != string(want) {
			t.Errorf("%s: it has become another one", name)
		}
		if name != "huge" {
			continue
		}
		if len(labels) < 5 {
			t.Errorf("only %d labels: this tests nothing", len(labels))
		}
		// A missing or changed piece must not result in a shorter policy.
		for i := range len(labels) - 3 {
			key := fmt.Sprint(state.LabelPolicy, i)
			less := maps.Clone(labels)
			delete(less, key)
			if got, err := state.PolicyOf(less); i > 0 && err == nil {
				t.Errorf("without %s: %d rules", key, len(got.Rules))
			} else if i == 0 && (got != nil || err != nil) {
				t.Errorf("without %s: %v, %v, want none, which denies", key, got, err)
			}
			less[key] = labels[key][1:]
			if _, err := state.PolicyOf(less); !errors.Is(err, spec.ErrRecord) {
				t.Errorf("with a damaged %s: %v", key, err)
			}
		}
	}
}

func TestSpec_policies_that_cannot_be_are_refused(t *testing.T) {
	for _, tt := range []struct {
		name    string
		network string
		policy  *netpolicy.Policy
		want    error
	}{
		{"without a network", spec.NetworkNone, &netpolicy.Policy{}, ErrSpec},
		{"invalid", spec.NetworkTAP, &netpolicy.Policy{Flows: -1}, netpolicy.ErrPolicy},
		{"valid", spec.NetworkTAP, &netpolicy.Policy{}, nil},
		{"none", spec.NetworkTAP, nil, nil},
	} {
		_, err := Spec{Name: "a", Image: "b", Network: tt.network, Policy: tt.policy}.WithDefaults()
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
	for text, ok := range map[string]bool{
		`{"image":"x","network":"tap","policy":{"rules":[]}}`:       true,
		`{"image":"x","network":"tap","policy":{"ruels":[]}}`:       false,
		`{"image":"x","network":"tap","policy":{"Rules":[]}}`:       false,
		`{"image":"x","network":"tap","policy":"allow everything"}`: false,
	} {
		if _, err := spec.Parse(strings.NewReader(text)); (err == nil) != ok {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestSpec_tags_that_cannot_be_are_refused(t *testing.T) {
	for _, tt := range []struct {
		name    string
		network string
		tags    []string
		want    error
	}{
		{"without a network", spec.NetworkNone, []string{"db"}, ErrSpec},
		{"twice the same", spec.NetworkTAP, []string{"db", "db"}, netpolicy.ErrPolicy},
		{"valid", spec.NetworkTAP, []string{"db", "team:a"}, nil},
		{"none", spec.NetworkNone, nil, nil},
	} {
		_, err := Spec{Name: "a", Image: "b", Network: tt.network, Tags: tt.tags}.WithDefaults()
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
}

func TestSetPolicy_of_a_vm_without_a_process_is_stored(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, network := range map[string]string{"with": spec.NetworkTAP, "without": spec.NetworkNone} {
		l, err := s.State.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: name, Network: network}, Phase: state.Asleep})
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
	}
	p := hugePolicy(t)
	if res, err := s.Sandbox("with").SetPolicy(t.Context(), p); err != nil || res.Live {
		t.Fatal(res, err)
	}
	got, err := s.Sandbox("with").Policy()
	if err != nil || len(got.Rules) != len(p.Rules) || !reflect.DeepEqual(got.Rules[7].CIDRs, p.Rules[7].CIDRs) {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := s.Sandbox("with").SetPolicy(t.Context(), &netpolicy.Policy{Flows: -1}); !errors.Is(err, netpolicy.ErrPolicy) {
		t.Errorf("an invalid policy: %v", err)
	}
	if got, err := s.Sandbox("with").Policy(); err != nil || len(got.Rules) != len(p.Rules) {
		t.Errorf("after that: %v, %v", got, err)
	}
	if _, err := s.Sandbox("without").SetPolicy(t.Context(), p); !errors.Is(err, ErrSpec) {
		t.Errorf("of a VM without a network: %v", err)
	}
	if _, err := s.Sandbox("without").Policy(); !errors.Is(err, ErrSpec) {
		t.Error(err)
	}
	if _, err := s.Sandbox("nobody").SetPolicy(t.Context(), p); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	// A record with a damaged policy cannot be read.
	path := s.State.VMDir("with") + "/vm.json"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(text), `"direction": "egress"`, `"direktion": "egress"`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.State.Get("with"); !errors.Is(err, spec.ErrRecord) {
		t.Errorf("a damaged policy: %v", err)
	}
}

func TestServe_record_with_an_invalid_policy_is_refused_before_anything_is_started(t *testing.T) {
	for before, after := range map[state.Phase]state.Phase{state.Starting: state.Stopped, state.Asleep: state.Asleep, state.Stopped: state.Stopped} {
		s, err := Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		// A user may have edited the record: it parses, but is invalid.
		l, err := s.State.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "a", Network: spec.NetworkTAP, Policy: &netpolicy.Policy{Flows: -1}}, Phase: before})
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
		var told []control.Report
		err = process.Serve(t.Context(), s.State, "a", process.ServeOptions{Log: slog.New(slog.DiscardHandler), Report: func(r control.Report) { told = append(told, r) }})
		if !errors.Is(err, netpolicy.ErrPolicy) || len(told) != 1 || told[0].Error == nil || told[0].Error.Code != "policy" {
			t.Errorf("%s: %v, %+v", before, err, told)
		}
		if layers, err := os.ReadDir(s.State.LayerDir()); err != nil || len(layers) != 0 {
			t.Errorf("%s: a disk was begun: %v, %v", before, layers, err)
		}
		if r, err := s.State.Load("a"); err != nil || r.Phase != after {
			t.Errorf("%s: it is %v now (%v), want %s", before, r, err, after)
		}
	}
}
