package lifetime

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Class says what happens to a sandbox that has ended or expired.
type Class string

// The classes.
const (
	// Ephemeral: it is removed, with every trace of it, when its guest has ended, its process was killed or it has
	// expired.
	Ephemeral Class = "ephemeral"
	// Resumable: it sleeps and wakes. When it has expired it is put to sleep and cannot be woken. It is removed
	// Keep.Expired later.
	Resumable Class = "resumable"
	// Workspace: as Resumable, but it is only removed on request.
	Workspace Class = "workspace"
)

// Classes are all classes.
var Classes = []Class{Ephemeral, Resumable, Workspace}

// ErrKeep means that a lifetime or a persistence is invalid.
var ErrKeep = errors.New("invalid lifetime")

// Check returns an error unless c is one of the classes.
func (c Class) Check() error {
	if !slices.Contains(Classes, c) {
		return fmt.Errorf("%w: class %q: use ephemeral, resumable or workspace", ErrKeep, c)
	}
	return nil
}

// Keep says what is kept and how long. The zero value keeps only the sleep that a sandbox comes back from.
type Keep struct {
	// Last is how many of its newest sleeps are kept: 0 to MaxLast. With 0, no sleep is kept for this reason.
	Last int `json:"last,omitempty"`
	// For is how many seconds a sleep is kept: 0 to MaxSeconds.
	For int64 `json:"for_seconds,omitempty"`
	// Expired is how many seconds an expired resumable sandbox is kept; 0 is DefaultExpired.
	Expired int64 `json:"expired_seconds,omitempty"`
}

// Default and limits of a Keep.
const (
	MaxLast        = 1000
	MaxSeconds     = 10 * 365 * 24 * 60 * 60
	DefaultExpired = 24 * 60 * 60
)

// Check returns an error for values out of bounds.
func (k Keep) Check() error {
	switch {
	case k.Last < 0 || k.Last > MaxLast:
		return fmt.Errorf("%w: keep the last %d sleeps: use 0 to %d", ErrKeep, k.Last, MaxLast)
	case k.For < 0 || k.For > MaxSeconds:
		return fmt.Errorf("%w: keep sleeps for %d s: use 0 to %d", ErrKeep, k.For, MaxSeconds)
	case k.Expired < 0 || k.Expired > MaxSeconds:
		return fmt.Errorf("%w: keep it for %d s when it has expired: use 0 to %d", ErrKeep, k.Expired, MaxSeconds)
	}
	return nil
}

// String returns the text form that ParseKeep reads.
func (k Keep) String() string {
	var parts []string
	if k.Last != 0 {
		parts = append(parts, "last="+strconv.Itoa(k.Last))
	}
	if k.For != 0 {
		parts = append(parts, "for="+(time.Duration(k.For)*time.Second).String())
	}
	if k.Expired != 0 {
		parts = append(parts, "expired="+(time.Duration(k.Expired)*time.Second).String())
	}
	return strings.Join(parts, ",")
}

// ParseKeep reads "last=5,for=72h,expired=24h"; each part is optional. Times are whole seconds, with d for days.
func ParseKeep(text string) (k Keep, err error) {
	if text == "" {
		return k, nil
	}
	seen := map[string]bool{}
	for part := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(part, "=")
		if seen[key] {
			return Keep{}, fmt.Errorf("%w: %q is said twice in %q", ErrKeep, key, text)
		}
		seen[key] = true
		switch key {
		case "last":
			k.Last, err = strconv.Atoi(value)
		case "for":
			k.For, err = parseSeconds(value)
		case "expired":
			k.Expired, err = parseSeconds(value)
		default:
			return Keep{}, fmt.Errorf("%w: %q in %q: use last=N, for=TIME and expired=TIME", ErrKeep, part, text)
		}
		if err != nil {
			return Keep{}, fmt.Errorf("%w: %q: use a number for last, and times as 12h or 7d", ErrKeep, part)
		}
	}
	return k, k.Check()
}

func parseSeconds(text string) (int64, error) {
	d, err := ParseDuration(text)
	return int64(d / time.Second), err
}

// ParseDuration reads a duration of whole seconds of at most MaxSeconds, such as 90s, 12h or 7d.
func ParseDuration(text string) (time.Duration, error) {
	var d time.Duration
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 32)
		if err != nil || n > MaxSeconds/(24*60*60) {
			return 0, fmt.Errorf("%w: %q is no duration: use one as 90s, 12h or 7d, of at most ten years", ErrKeep, text)
		}
		d = time.Duration(n) * 24 * time.Hour
	} else {
		var err error
		if d, err = time.ParseDuration(text); err != nil || d > MaxSeconds*time.Second {
			return 0, fmt.Errorf("%w: %q is no duration: use one as 90s, 12h or 7d, of at most ten years", ErrKeep, text)
		}
	}
	if d < 0 || d%time.Second != 0 {
		return 0, fmt.Errorf("%w: %q: use whole seconds, not below 0", ErrKeep, text)
	}
	return d, nil
}

// Sandbox is the part of a sandbox that decides how long it lasts.
type Sandbox struct {
	ID, Name string
	Class    Class
	Keep     Keep
	// Expires is zero for never.
	Expires time.Time
	// Running reports that it has a process or soon will. Ended reports that its guest has ended or its process
	// was killed.
	Running, Ended bool
	// Needs are the snapshots that it comes back from, or can be taken back to at once.
	Needs []string
	// Unknown reports that its lifetime could not be read: nothing of it is removed.
	Unknown bool
}

// Expired reports whether a time of expiry, zero for never, has come.
func Expired(expires, now time.Time) bool { return !expires.IsZero() && !now.Before(expires) }

// Sleep is a snapshot that a sandbox slept in.
type Sleep struct {
	ID string
	// Owner is the id of its sandbox, which may be gone.
	Owner   string
	Created time.Time
	// Tagged reports that a user has marked it to be kept.
	Tagged bool
	// Bytes is what its removal frees.
	Bytes int64
}

// Why is the reason for a step.
type Why string

// The reasons.
const (
	WhyExpired Why = "expired"
	WhyEnded   Why = "ended"
	WhyOld     Why = "not kept"
	WhyOrphan  Why = "its sandbox is gone"
)

// Step is one thing to do.
type Step struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	Why  Why    `json:"why"`
	// Bytes is what the deletion of a snapshot frees.
	Bytes int64 `json:"bytes,omitempty"`
}

// Plan is what must be done, in this order.
type Plan struct {
	// Sleep are sandboxes to put to sleep, and Remove sandboxes to remove.
	Sleep  []Step `json:"sleep"`
	Remove []Step `json:"remove"`
	// Snapshots are sleeps to delete, beside those that go with the sandboxes.
	Snapshots []Step `json:"old_sleeps"`
}

// Decide returns what must be done at a time. The order of its arguments' elements does not matter. A Plan holds
// for the moment of the call: the caller must check again when it carries a step out.
func Decide(sandboxes []Sandbox, sleeps []Sleep, now time.Time) Plan {
	p := Plan{Sleep: []Step{}, Remove: []Step{}, Snapshots: []Step{}}
	going := map[string]bool{}
	for _, s := range sandboxes {
		if s.Unknown {
			continue
		}
		expired := Expired(s.Expires, now)
		switch {
		case s.Class == Ephemeral && expired:
			p.Remove = append(p.Remove, Step{ID: s.ID, Name: s.Name, Why: WhyExpired})
			going[s.ID] = true
		case s.Class == Ephemeral && s.Ended:
			p.Remove = append(p.Remove, Step{ID: s.ID, Name: s.Name, Why: WhyEnded})
			going[s.ID] = true
		case s.Class == Resumable && Expired(s.removal(), now):
			p.Remove = append(p.Remove, Step{ID: s.ID, Name: s.Name, Why: WhyExpired})
			going[s.ID] = true
		case expired && s.Running:
			p.Sleep = append(p.Sleep, Step{ID: s.ID, Name: s.Name, Why: WhyExpired})
		}
	}
	for _, s := range Unkept(sandboxes, sleeps, now) {
		if !going[s.Owner] {
			why := WhyOrphan
			if slices.ContainsFunc(sandboxes, func(b Sandbox) bool { return b.ID == s.Owner }) {
				why = WhyOld
			}
			p.Snapshots = append(p.Snapshots, Step{ID: s.ID, Why: why, Bytes: s.Bytes})
		}
	}
	byName := func(a, b Step) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) }
	slices.SortFunc(p.Sleep, byName)
	slices.SortFunc(p.Remove, byName)
	slices.SortFunc(p.Snapshots, byName)
	return p
}

// removal returns when an expired sandbox must be removed, zero for never.
func (s Sandbox) removal() time.Time {
	if s.Expires.IsZero() {
		return time.Time{}
	}
	return s.Expires.Add(time.Duration(cmp.Or(s.Keep.Expired, DefaultExpired)) * time.Second)
}

// Unkept returns the sleeps that nothing keeps: no sandbox needs them, they have no tag, and their sandbox is gone
// or keeps fewer sleeps and for less long. It leaves out sleeps of a running sandbox: one may be new and not in
// the sandbox's record yet.
func Unkept(sandboxes []Sandbox, sleeps []Sleep, now time.Time) []Sleep {
	owners, needed := map[string]Sandbox{}, map[string]bool{}
	for _, s := range sandboxes {
		owners[s.ID] = s
		for _, id := range s.Needs {
			needed[id] = true
		}
	}
	newest := slices.Clone(sleeps)
	slices.SortFunc(newest, func(a, b Sleep) int { return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.ID, b.ID)) })
	var out []Sleep
	count := map[string]int{}
	for _, s := range newest {
		o, there := owners[s.Owner]
		count[s.Owner]++
		switch {
		case needed[s.ID] || s.Tagged:
		case !there:
			out = append(out, s)
		case o.Running || o.Unknown:
		case count[s.Owner] <= o.Keep.Last:
		case now.Sub(s.Created) < time.Duration(o.Keep.For)*time.Second:
		default:
			out = append(out, s)
		}
	}
	return out
}
