package spec

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Self says what programs in a VM may ask the host for, about this VM and no other. The grant belongs to the VM:
// every program in it may use it. Forks and clones get it as well.
type Self struct {
	// Allow has some of "sleep", "snapshot", "hold", "wake", "extend=TIME" and "fork=N". TIME, such as 90m, 24h or
	// 7d, is by how much the guest may put off its expiry in all, beyond what its owner has set. N is how many
	// children that the guest asked for may exist at once; these children have no such grant. If empty, nothing is
	// allowed, and nothing listens to the guest's requests.
	Allow []string `json:"allow,omitempty"`
}

// Validate returns an ErrInvalid for a grant that does not exist.
func (s Self) Validate() error {
	var seen []string
	for _, entry := range s.Allow {
		what, amount, has := strings.Cut(entry, "=")
		switch {
		case !slices.Contains(agentpb.SelfWords(), what), has && what != agentpb.SelfExtend && what != agentpb.SelfFork:
			return fmt.Errorf("%w: a guest cannot be allowed %q: use %s, %s, %s, %s, %s=24h or %s=2", ErrInvalid, entry, agentpb.SelfSleep, agentpb.SelfSnapshot, agentpb.SelfHold, agentpb.SelfWake, agentpb.SelfExtend, agentpb.SelfFork)
		case slices.Contains(seen, what):
			return fmt.Errorf("%w: the guest is allowed %q twice", ErrInvalid, what)
		case what == agentpb.SelfExtend:
			if d, err := lifetime.ParseDuration(amount); err != nil || d < time.Second || d > lifetime.MaxSeconds*time.Second {
				return fmt.Errorf("%w: a guest cannot be allowed %q: say by how much in all it may put its expiry off, as %s=24h, and at most %d s", ErrInvalid, entry, agentpb.SelfExtend, lifetime.MaxSeconds)
			}
		}
		if what == agentpb.SelfFork {
			if _, err := parseSelfForks(amount); err != nil {
				return err
			}
		}
		seen = append(seen, what)
	}
	return nil
}

// amount returns the value of an allowed word, and whether the word is allowed.
func (s Self) amount(word string) (amount string, allowed bool) {
	for _, entry := range s.Allow {
		if what, amount, _ := strings.Cut(entry, "="); what == word {
			return amount, true
		}
	}
	return "", false
}

// Allows reports whether a guest may ask for what.
func (s Self) Allows(what string) bool {
	_, allowed := s.amount(what)
	return allowed
}

// Extension returns by how much the guest may put off its expiry in all.
func (s Self) Extension() time.Duration {
	amount, _ := s.amount(agentpb.SelfExtend)
	d, _ := lifetime.ParseDuration(amount) // 0 if it is not allowed
	return d
}

// The words of Self.Allow.
const (
	SelfSleep    = agentpb.SelfSleep
	SelfSnapshot = agentpb.SelfSnapshot
	SelfHold     = agentpb.SelfHold
	SelfWake     = agentpb.SelfWake
	SelfExtend   = agentpb.SelfExtend
	SelfFork     = agentpb.SelfFork
)

// MaxSelfForks is how many children at once a guest may be allowed to ask for.
const MaxSelfForks = 64

// parseSelfForks returns N of the grant "fork=N".
func parseSelfForks(amount string) (int, error) {
	n, err := strconv.Atoi(amount)
	if err != nil || n < 1 || n > MaxSelfForks {
		return 0, fmt.Errorf("%w: a guest cannot be allowed %s=%q: say how many children it may have at once, 1 to %d", ErrInvalid, agentpb.SelfFork, amount, MaxSelfForks)
	}
	return n, nil
}

// Forks returns how many children that it asked for a guest may have at once.
func (s Self) Forks() int {
	amount, _ := s.amount(agentpb.SelfFork)
	n, _ := parseSelfForks(amount) // 0 if it is not allowed
	return n
}

// Childless returns the grant of a child that its parent asked for: no forks, or they would multiply.
func (s Self) Childless() Self {
	return Self{Allow: slices.DeleteFunc(slices.Clone(s.Allow), func(entry string) bool {
		word, _, _ := strings.Cut(entry, "=")
		return word == agentpb.SelfFork
	})}
}
