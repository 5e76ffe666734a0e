package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

const (
	// listTime is how old a list may be that a caller gets at once, and listWait how long he waits for a newer one.
	listTime, listWait = 5 * time.Second, 3 * time.Second
	// maxListed bounds the sandboxes of a list.
	maxListed = 10_000
	// maxHosts is how many hosts are asked at once, and hostTime how long each may take.
	maxHosts, hostTime = 16, 3 * time.Second
	// maxRows is the most bytes of a host's answer.
	maxRows = 16 << 20
	// settledTime is for how long the record of a sandbox is read again although the store's list shows no change: two
	// changes may have one time there.
	settledTime = 10 * time.Second

	familyPrefix = "families/"
	listService  = "list"
)

// Catalog lists the sandboxes of a cluster. What the store says is read when somebody asks, at most once in listTime,
// and only what has changed. Then each host that has some of them is asked once.
type Catalog struct {
	n     *Node
	peers *peer.Peers

	mu      sync.Mutex // guards what follows
	is      state.Others
	at      time.Time     // of is; zero if there is none yet
	reading chan struct{} // closed at the end of the read that is under way; nil if none is
	failed  error         // of the last read

	// Only the read that is under way uses these.
	families map[string]familyRead
	heads    map[string]*headDoc
	said     map[string]said // what hosts have said last, by name of the sandbox
}

type familyRead struct {
	info    blob.Info
	family  *ledger.Family
	settled bool
}

type said struct {
	row row
	by  string
	at  time.Time
}

// row is what a host says of a sandbox that it has.
type row struct {
	Record   *state.Record `json:"record"`
	Metadata spec.Metadata `json:"metadata"`
}

// Catalog returns a list of the cluster's sandboxes. p asks other hosts.
func (n *Node) Catalog(p *peer.Peers) *Catalog {
	return &Catalog{n: n, peers: p, families: map[string]familyRead{}, heads: map[string]*headDoc{}, said: map[string]said{}}
}

// PeerHandlers returns the handlers of what hosts ask each other: for peer.Serve.
func (n *Node) PeerHandlers() map[string]http.Handler {
	return map[string]http.Handler{listService: http.HandlerFunc(n.serveRows), moveService: http.HandlerFunc(n.serveMove)}
}

// serveRows answers with the shared sandboxes that this host has claimed.
func (n *Node) serveRows(w http.ResponseWriter, _ *http.Request) {
	rows := map[string]row{}
	for _, name := range n.held() {
		r, err := n.state.Get(name)
		if err != nil {
			continue
		}
		if m, err := n.state.Metadata(name); err == nil {
			rows[name] = row{r.Listed(), m}
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(rows) // an error means that the host has gone
}

// held returns the sandboxes that this process has claimed.
func (n *Node) held() (names []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, c := range n.claims {
		if c.Err() == nil {
			names = append(names, name)
		}
	}
	return names
}

// Published returns a sandbox that sleeps in the store and that no host has, or sandbox.ErrNotFound.
func (c *Catalog) Published(ctx context.Context, name string) (state.Other, error) {
	n := c.n
	missing := fmt.Errorf("%w: %.64q", sandbox.ErrNotFound, name)
	if !spec.ValidName(name) || n.holds(name) {
		return state.Other{}, missing
	}
	f, err := n.family(ctx, name)
	if errors.Is(err, ledger.ErrNotFound) || err == nil && (f.Deleted || f.Head == "") {
		err = missing
	}
	if err != nil {
		return state.Other{}, err
	}
	if host, err := n.holder(ctx, f, false); err != nil || host != "" {
		return state.Other{}, errors.Join(missing, err)
	}
	d, err := n.headOf(ctx, f.Head, name)
	if err != nil {
		return state.Other{}, err
	}
	return state.Other{Record: d.Record, Metadata: d.Metadata}, nil
}

// headOf returns what a head says of its sandbox.
func (n *Node) headOf(ctx context.Context, id, name string) (*headDoc, error) {
	h, err := n.head(ctx, id)
	if err != nil {
		return nil, err
	}
	d, err := decodeDoc(h, name)
	return &d, err
}

// Others lists the sandboxes of the cluster that this host does not have as they are now. It waits for a list that is
// not too old, but not for long.
func (c *Catalog) Others(ctx context.Context) state.Others {
	c.mu.Lock()
	if time.Since(c.at) > listTime && c.reading == nil {
		done := make(chan struct{})
		c.reading = done
		if !c.n.inBackground(func() { c.read(done) }) {
			close(done)
			c.reading = nil
		}
	}
	if reading := c.reading; reading != nil && time.Since(c.at) > listTime {
		c.mu.Unlock()
		wait := time.NewTimer(listWait)
		select {
		case <-reading:
		case <-wait.C:
		case <-ctx.Done():
		}
		wait.Stop()
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	out := c.is
	out.Self, out.Held = c.n.o.Name, func(name string) bool { return c.n.claimed(name) != nil }
	out.Problems = slices.Clone(out.Problems)
	switch age := time.Since(c.at); {
	case c.at.IsZero() && c.failed != nil:
		out.Problems = append(out.Problems, "the cluster's sandboxes on other hosts are missing: "+c.failed.Error())
	case c.at.IsZero():
		out.Problems = append(out.Problems, "the cluster's sandboxes on other hosts are still being read, and missing")
	case age > listTime+listWait:
		out.Problems = append(out.Problems, fmt.Sprintf("the cluster's sandboxes on other hosts are as they were %v ago", age.Round(time.Second)))
	}
	return out
}

// inBackground runs what ends with the node. It reports false if that has ended.
func (n *Node) inBackground(do func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.life.Err() != nil {
		return false
	}
	n.background.Go(do)
	return true
}

// read makes a new list.
func (c *Catalog) read(done chan struct{}) {
	is, err := c.list(c.n.life)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed = err; err == nil {
		c.is, c.at = is, time.Now()
	} else if c.n.life.Err() == nil {
		c.n.log.Warn("listing the sandboxes of the cluster", "error", err)
	}
	c.reading = nil
	close(done)
}

func (c *Catalog) list(ctx context.Context) (out state.Others, err error) {
	more, err := c.readFamilies(ctx)
	if err != nil {
		return out, err
	}
	if more {
		out.Problems = append(out.Problems, fmt.Sprintf("the cluster has more than %d sandboxes: the others are missing", maxListed))
	}
	byHost := map[string][]string{} // "" is those in the store
	for name, f := range c.families {
		host, list, err := c.place(ctx, name, f.family)
		if err != nil {
			return out, err
		}
		if list {
			byHost[host] = append(byHost[host], name)
		}
	}
	problems := c.askHosts(ctx, byHost)
	need := []string{}
	for host, names := range byHost {
		for _, name := range names {
			if s, ok := c.said[name]; !ok || s.by != host {
				need = append(need, name)
			}
		}
	}
	failed := c.readHeads(ctx, need)
	if ctx.Err() != nil {
		return out, context.Cause(ctx)
	}
	for host, names := range byHost {
		for _, name := range names {
			o := state.Other{Host: host}
			switch s, ok := c.said[name]; {
			case ok && s.by == host && host != "":
				o.Record, o.Metadata = s.row.Record, s.row.Metadata
				if problems[host] != nil {
					o.Stale = s.at
				}
			default:
				d := c.heads[c.families[name].family.Head]
				if d == nil {
					continue // it is being published for the first time, or cannot be read
				}
				o.Record, o.Metadata, o.Published = d.Record, d.Metadata, host != ""
			}
			out.List = append(out.List, o)
		}
	}
	slices.SortFunc(out.List, func(a, b state.Other) int { return cmp.Compare(a.Record.Spec.Name, b.Record.Spec.Name) })
	for host, err := range problems {
		out.Problems = append(out.Problems, fmt.Sprintf("the host %s does not answer, and its sandboxes are as they were: %v", host, err))
	}
	slices.Sort(out.Problems)
	if failed > 0 {
		out.Problems = append(out.Problems, fmt.Sprintf("%d sandboxes of the store cannot be read: see the log of the server", failed))
	}
	return out, nil
}

// readFamilies brings the records of sandboxes up to date.
func (c *Catalog) readFamilies(ctx context.Context) (more bool, err error) {
	there := map[string]blob.Info{}
	enough := errors.New("enough")
	err = c.n.store.List(ctx, familyPrefix, func(i blob.Info) error {
		if len(there) == maxListed {
			return enough
		}
		if name := strings.TrimPrefix(i.Key, familyPrefix); spec.ValidName(name) {
			there[name] = i
		}
		return nil
	})
	if more = errors.Is(err, enough); err != nil && !more {
		return false, fmt.Errorf("listing the sandboxes of the store: %w", err)
	}
	for name := range c.families {
		if _, ok := there[name]; !ok {
			delete(c.families, name)
		}
	}
	var mu sync.Mutex // guards c.families
	var group errgroup.Group
	group.SetLimit(maxReads)
	for name, info := range there {
		if have := c.families[name]; have.settled && have.info == info {
			continue
		}
		group.Go(func() error {
			settled := time.Since(info.Changed) > settledTime
			f, err := c.n.ledger.Family(ctx, name)
			if errors.Is(err, ledger.ErrNotFound) {
				return nil
			}
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			c.families[name] = familyRead{info, f, settled}
			return nil
		})
	}
	return more, group.Wait()
}

// place says which other host has a sandbox, and whether it is to be listed: not if this host knows it as it is.
func (c *Catalog) place(ctx context.Context, name string, f *ledger.Family) (host string, list bool, err error) {
	if f.Deleted || f.Head == "" && f.Holder == nil || c.n.holds(name) {
		return "", false, nil
	}
	if h := f.Holder; h != nil {
		is, err := c.n.hostOf(ctx, h.Host, false)
		switch {
		case errors.Is(err, ledger.ErrNotFound):
		case err != nil:
			return "", false, err
		case is.Incarnation == h.Incarnation && is.Left > 0:
			return h.Host, h.Host != c.n.o.Name, nil
		}
	}
	claim, err := c.n.dir.Claim(name)
	if err == nil && claim != nil && claim.Head == f.Head {
		if _, err := c.n.state.Load(name); err == nil {
			return "", false, nil
		}
	}
	return "", f.Head != "", nil
}

// askHosts asks the hosts what they have. It returns why some do not answer.
func (c *Catalog) askHosts(ctx context.Context, byHost map[string][]string) (problems map[string]error) {
	problems = map[string]error{}
	var mu sync.Mutex // guards problems and c.said
	var group errgroup.Group
	group.SetLimit(maxHosts)
	now := map[string]said{}
	for host, names := range byHost {
		if host == "" {
			continue
		}
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, hostTime)
			defer cancel()
			text, err := c.peers.Ask(ctx, host, listService, nil, maxRows)
			rows := map[string]row{}
			if err == nil {
				err = json.Unmarshal(text, &rows)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				problems[host] = err
				for _, name := range names {
					if s, ok := c.said[name]; ok && s.by == host {
						now[name] = s
					}
				}
				return nil
			}
			for _, name := range names {
				if r, ok := rows[name]; ok && r.Record != nil && r.Record.Spec.Name == name {
					now[name] = said{r, host, time.Now()}
				}
			}
			return nil
		})
	}
	_ = group.Wait() // it returns none
	c.said = now
	return problems
}

// readHeads reads what the heads of sandboxes say, unless that is known, and forgets heads that no sandbox has. It
// returns how many cannot be read.
func (c *Catalog) readHeads(ctx context.Context, names []string) (failed int) {
	was := c.heads
	c.heads = map[string]*headDoc{}
	for _, f := range c.families {
		if d, ok := was[f.family.Head]; ok {
			c.heads[f.family.Head] = d
		}
	}
	var mu sync.Mutex // guards c.heads and failed
	var group errgroup.Group
	group.SetLimit(maxReads)
	for _, name := range names {
		id := c.families[name].family.Head
		mu.Lock()
		_, ok := c.heads[id]
		mu.Unlock()
		if id == "" || ok {
			continue
		}
		group.Go(func() error {
			d, err := c.n.headOf(ctx, id, name)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				if failed++; failed == 1 {
					c.n.log.Warn("reading how a sandbox sleeps in the store", "sandbox", name, "error", err)
				}
				return nil
			}
			c.heads[id] = d
			return nil
		})
	}
	_ = group.Wait() // it returns none
	return failed
}
