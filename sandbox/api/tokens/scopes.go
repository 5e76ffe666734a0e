package tokens

import (
	"fmt"
	"slices"
	"strings"
)

// Scope is a right of a caller.
type Scope string

// The scopes. A token has a set of them; none includes another.
const (
	ScopeNone Scope = "" // of a route: any caller
	// ScopeRead is for what is known about sandboxes, snapshots and images, without their files.
	ScopeRead Scope = "read"
	// ScopeExec is for commands, terminals, processes and ports in sandboxes.
	ScopeExec Scope = "exec"
	// ScopeFiles is for the files in sandboxes.
	ScopeFiles Scope = "files"
	// ScopeCreate is for making, changing and removing sandboxes and snapshots: with policies, secrets and services.
	ScopeCreate Scope = "create"
	// ScopeAdmin is for what all sandboxes of a host share: images, volumes, imports, pruning, figures.
	ScopeAdmin Scope = "admin"
)

// scopeWrite is the name of all scopes together, as files and command lines had it before there were several.
const scopeWrite = "write"

// order is the order of scopes in texts.
var order = []Scope{ScopeRead, ScopeExec, ScopeFiles, ScopeCreate, ScopeAdmin}

// Scopes is a set of scopes, in a fixed order.
type Scopes []Scope

// All returns all scopes.
func All() Scopes { return slices.Clone(Scopes(order)) }

// ParseScopes reads scopes with commas between them. "write" means all.
func ParseScopes(text string) (Scopes, error) {
	var out Scopes
	words := strings.Split(text, ",")
	for _, w := range words {
		if w != scopeWrite && !slices.Contains(order, Scope(w)) {
			return nil, fmt.Errorf("%w: scope %q: use read, exec, files, create, admin, with commas between them, or write for all", ErrTokens, w)
		}
	}
	for _, s := range order {
		if slices.Contains(words, string(s)) || slices.Contains(words, scopeWrite) {
			out = append(out, s)
		}
	}
	return out, nil
}

// Has reports whether a caller with these scopes may do what wants one.
func (s Scopes) Has(want Scope) bool { return want == ScopeNone || slices.Contains(s, want) }

// Words returns the names of the scopes.
func (s Scopes) Words() []string {
	out := make([]string, len(s))
	for i, one := range s {
		out[i] = string(one)
	}
	return out
}

// String returns the scopes with commas between them.
func (s Scopes) String() string { return strings.Join(s.Words(), ",") }
