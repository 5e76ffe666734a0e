package lifetime

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) time.Time { return noon.Add(-d) }

func TestDecide(t *testing.T) {
	tests := map[string]struct {
		sandboxes             []Sandbox
		sleep, remove, delete string // ids
		sleeps                []Sleep
	}{
		"nothing of nothing": {},
		"one that never expires stays": {
			sandboxes: []Sandbox{{ID: "a", Class: Resumable, Running: true}},
		},
		"one whose time is not over stays": {
			sandboxes: []Sandbox{{ID: "a", Class: Ephemeral, Running: true, Expires: noon.Add(1)}},
		},
		"an ephemeral one is removed at its expiry, running": {
			sandboxes: []Sandbox{{ID: "a", Class: Ephemeral, Running: true, Expires: noon}}, remove: "a",
		},
		"an ephemeral one is removed when it has ended": {
			sandboxes: []Sandbox{{ID: "a", Class: Ephemeral, Ended: true}}, remove: "a",
		},
		"others that have ended stay": {
			sandboxes: []Sandbox{{ID: "a", Class: Resumable, Ended: true}, {ID: "b", Class: Workspace, Ended: true}},
		},
		"a resumable one is put to sleep at its expiry": {
			sandboxes: []Sandbox{{ID: "a", Class: Resumable, Running: true, Expires: noon}}, sleep: "a",
		},
		"a resumable one that sleeps stays for a day": {
			sandboxes: []Sandbox{{ID: "a", Class: Resumable, Expires: ago(DefaultExpired*time.Second - 1)}},
		},
		"a resumable one is removed a day after its expiry": {
			sandboxes: []Sandbox{{ID: "a", Class: Resumable, Expires: ago(DefaultExpired * time.Second)}}, remove: "a",
		},
		"a resumable one is removed as long after its expiry as it says": {
			sandboxes: []Sandbox{
				{ID: "a", Class: Resumable, Expires: ago(time.Minute), Keep: Keep{Expired: 60}},
				{ID: "b", Class: Resumable, Expires: ago(48 * time.Hour), Keep: Keep{Expired: 72 * 3600}},
			}, remove: "a",
		},
		"a workspace is put to sleep, and never removed": {
			sandboxes: []Sandbox{{ID: "a", Class: Workspace, Running: true, Expires: ago(time.Hour)}, {ID: "b", Class: Workspace, Expires: ago(MaxSeconds * time.Second)}},
			sleep:     "a",
		},
		"of one that could not be read nothing is removed": {
			sandboxes: []Sandbox{{ID: "a", Class: Ephemeral, Ended: true, Expires: ago(1), Unknown: true}},
			sleeps:    []Sleep{{ID: "1", Owner: "a", Created: ago(time.Hour)}},
		},
		"sleeps that are needed, tagged, young, among the last or of one that runs stay": {
			sandboxes: []Sandbox{
				{ID: "a", Keep: Keep{Last: 1, For: 3600}, Needs: []string{"needed"}},
				{ID: "b", Running: true},
				{ID: "c", Needs: []string{"of another"}},
			},
			sleeps: []Sleep{
				{ID: "newest", Owner: "a", Created: ago(time.Minute)}, {ID: "young", Owner: "a", Created: ago(time.Hour - 1)},
				{ID: "old", Owner: "a", Created: ago(time.Hour)}, {ID: "needed", Owner: "a", Created: ago(2 * time.Hour)},
				{ID: "tagged", Owner: "a", Created: ago(3 * time.Hour), Tagged: true},
				{ID: "runs", Owner: "b", Created: ago(4 * time.Hour)},
				{ID: "of another", Owner: "gone", Created: ago(time.Hour)}, {ID: "orphan", Owner: "gone", Created: ago(1)},
			},
			delete: "old orphan",
		},
		"sleeps of one that is removed are not counted besides": {
			sandboxes: []Sandbox{{ID: "a", Class: Ephemeral, Ended: true}},
			sleeps:    []Sleep{{ID: "1", Owner: "a", Created: ago(time.Hour)}}, remove: "a",
		},
		"a clock that was ahead keeps what it has written": {
			sandboxes: []Sandbox{{ID: "a", Keep: Keep{For: 1}}},
			sleeps:    []Sleep{{ID: "1", Owner: "a", Created: noon.Add(time.Hour)}},
		},
	}
	ids := func(steps []Step) string {
		var out []string
		for _, s := range steps {
			out = append(out, s.ID)
		}
		return strings.Join(out, " ")
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := Decide(tt.sandboxes, tt.sleeps, noon)
			if ids(p.Sleep) != tt.sleep || ids(p.Remove) != tt.remove || ids(p.Snapshots) != tt.delete {
				t.Errorf("the plan is %+v", p)
			}
		})
	}
}

// Whatever there is: what is needed or tagged stays, as many stay as are to be kept, and the order does not matter.
func TestUnkept_never_takes_what_is_kept(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var sandboxes []Sandbox
		for i := range rng.IntN(4) {
			s := Sandbox{ID: fmt.Sprint("s", i), Running: rng.IntN(4) == 0, Unknown: rng.IntN(6) == 0, Keep: Keep{Last: rng.IntN(4), For: rng.Int64N(100)}}
			for range rng.IntN(3) {
				s.Needs = append(s.Needs, fmt.Sprint(rng.IntN(12)))
			}
			sandboxes = append(sandboxes, s)
		}
		var sleeps []Sleep
		for i := range rng.IntN(12) {
			sleeps = append(sleeps, Sleep{ID: fmt.Sprint(i), Owner: fmt.Sprint("s", rng.IntN(5)), Created: ago(time.Duration(rng.IntN(200)) * time.Second), Tagged: rng.IntN(5) == 0})
		}
		drop := map[string]bool{}
		for _, s := range Unkept(sandboxes, sleeps, noon) {
			drop[s.ID] = true
		}
		rng.Shuffle(len(sleeps), func(i, j int) { sleeps[i], sleeps[j] = sleeps[j], sleeps[i] })
		for _, s := range Unkept(sandboxes, sleeps, noon) {
			if !drop[s.ID] {
				t.Fatalf("in another order %s is dropped as well", s.ID)
			}
		}
		left := map[string]int{}
		have := map[string]int{}
		for _, s := range sleeps {
			have[s.Owner]++
			if !drop[s.ID] {
				left[s.Owner]++
			}
			if !drop[s.ID] {
				continue
			}
			if s.Tagged {
				t.Fatalf("%s is tagged", s.ID)
			}
			for _, b := range sandboxes {
				if slices.Contains(b.Needs, s.ID) || b.ID == s.Owner && (b.Running || b.Unknown || noon.Sub(s.Created) < time.Duration(b.Keep.For)*time.Second) {
					t.Fatalf("%s is kept by %+v", s.ID, b)
				}
			}
		}
		for _, b := range sandboxes {
			if left[b.ID] < min(b.Keep.Last, have[b.ID]) {
				t.Fatalf("of %d sleeps of %+v %d are left", have[b.ID], b, left[b.ID])
			}
		}
	}
}

func TestParseKeep(t *testing.T) {
	for text, want := range map[string]Keep{
		"":                               {},
		"last=5":                         {Last: 5},
		"for=72h":                        {For: 72 * 3600},
		"for=3d,last=2,expired=1h":       {Last: 2, For: 3 * 86400, Expired: 3600},
		"last=1000,for=3650d,expired=1s": {Last: 1000, For: MaxSeconds, Expired: 1},
	} {
		k, err := ParseKeep(text)
		if err != nil || k != want {
			t.Errorf("%q: %+v (%v), want %+v", text, k, err, want)
		}
		if again, err := ParseKeep(k.String()); err != nil || again != k {
			t.Errorf("%q: %q is read as %+v (%v)", text, k, again, err)
		}
	}
	for _, text := range []string{"5", "last", "last=-1", "last=1001", "last=x", "for=1", "for=-1s", "for=1500ms", "for=3651d", "for=99999999999999999d", "last=1,last=2", "last=1,", "forever"} {
		if k, err := ParseKeep(text); !errors.Is(err, ErrKeep) {
			t.Errorf("%q: %+v (%v), want ErrKeep", text, k, err)
		}
	}
}

func FuzzParseKeep(f *testing.F) {
	for _, s := range []string{"", "last=5,for=72h,expired=24h", "for=7d", "last=,for", "for=0.5h", "last=+3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		k, err := ParseKeep(text)
		if err != nil {
			if !errors.Is(err, ErrKeep) {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		if err := k.Check(); err != nil {
			t.Fatalf("%q is read as %+v, which is refused: %v", text, k, err)
		}
		if again, err := ParseKeep(k.String()); err != nil || again != k {
			t.Fatalf("%q: %+v is read back as %+v (%v)", text, k, again, err)
		}
	})
}
