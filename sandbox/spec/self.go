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

// Self says what programs in a VM may ask the host for, about this VM and no other. The grant is the
// VM's: every program in it may use it. Forks and clones have it as well.
type Self struct {
	// Allow has "sleep", "snapshot", "hold", "wake", "extend=TIME" and "fork=N", or some of them. TIME, as 90m, 24h or
	// 7d, is by how much the guest may put its expiry off in all, beyond what its owner has set, and N how many
	// children that it has asked for there may be at once, which have no such grant. Empty is nothing: the guest finds
	// nobody to ask.
	Allow []string `json:"allow,omitempty"`
}

// Validate says what is wrong with it, by an ErrInvalid.
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

// amount is what follows a word that is allowed, and whether it is.
func (s Self) amount(word string) (amount string, allowed bool) {
	for _, entry := range s.Allow {
		if what, amount, _ := strings.Cut(entry, "="); what == word {
			return amount, true
		}
	}
	return "", false
}

// Allows says whether a guest may ask for something.
func (s Self) Allows(what string) bool {
	_, allowed := s.amount(what)
	return allowed
}

// Extension is by how much the guest may put its expiry off in all.
func (s Self) Extension() time.Duration {
	amount, _ := s.amount(agentpb.SelfExtend)
	d, _ := lifetime.ParseDuration(amount) // 0 of one that is not allowed
	return d
}

// MaxSelfForks is how many children at once a guest may be allowed to ask for.
const MaxSelfForks = 64

// parseSelfForks is N of the grant "fork=N".
func parseSelfForks(amount string) (int, error) {
	n, err := strconv.Atoi(amount)
	if err != nil || n < 1 || n > MaxSelfForks {
		return 0, fmt.Errorf("%w: a guest cannot be allowed %s=%q: say how many children it may have at once, 1 to %d", ErrInvalid, agentpb.SelfFork, amount, MaxSelfForks)
	}
	return n, nil
}

// Forks is how many children that it has asked for a guest may have at once.
func (s Self) Forks() int {
	amount, _ := s.amount(agentpb.SelfFork)
	n, _ := parseSelfForks(amount) // 0 of one that is not allowed
	return n
}

// Childless is what a child may ask for that its parent has asked for: no forks, or they would multiply.
func (s Self) Childless() Self {
	return Self{Allow: slices.DeleteFunc(slices.Clone(s.Allow), func(entry string) bool {
		word, _, _ := strings.Cut(entry, "=")
		return word == agentpb.SelfFork
	})}
}
