package ledger_test

import (
	"bytes"
	"cmp"
	"container/heap"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/blob"
)

// The simulation runs the package's own code for several hosts. One goroutine at a time runs: each call of the store
// and each sleep waits for the world, which has the time, draws what the network does with each, and checks after each
// step what must always hold. A seed repeats it.

const (
	simTTL      = 10 * time.Second
	simHosts    = 3
	simWorkers  = 2 // of each host
	simFamilies = 4
	simChaos    = 15 * simTTL
	simCalm     = 12 * simTTL
)

var errNetwork, errCrash = errors.New("the network has failed"), errors.New("the process has crashed")

type event struct {
	at  time.Duration
	seq int
	do  func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(e[i].at, e[j].at), cmp.Compare(e[i].seq, e[j].seq)) < 0
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// A call is one of a process to the world: of the store, or a sleep.
type call struct {
	p              *proc
	label, op, key string
	old            blob.Version
	body           []byte
	d              time.Duration
	reply          chan result
}

type result struct {
	body    []byte
	version blob.Version
	err     error
}

type running struct {
	p *proc
	c *ledger.Claim
}

type world struct {
	seed uint64
	rng  *rand.Rand
	now  time.Duration
	seq  int
	todo events
	step int
	hash uint64

	mu       sync.Mutex
	fresh    []*call
	runs     map[string][]running
	names    [simFamilies]string
	claimed  [simFamilies]time.Duration
	acked    map[string]int
	snapshot int
	failure  string

	objects  map[string][]byte
	families map[string]*ledger.Family
	// holders has the host of each claim, by family and fence. before is the last snapshot of a family's last life.
	holders map[string]map[uint64]string
	before  map[string]int
	deleted map[string]bool
	orphans map[string]bool // put after their upload was given up
	hosts   [simHosts]*simHost
	calm    bool
	calms   int
	// wild means that clocks are so wrong that a sandbox may run twice. All else must hold.
	wild bool
	// narrow means that clocks are as wrong as they may be, and networks worse.
	narrow bool
	stats  map[string]int
}

type simHost struct {
	name     string
	p        *proc
	index    int
	cut      time.Duration // from the network until then
	leaky    bool          // not quite cut
	slow     time.Duration // answers take long until then
	procsUp  []*proc       // more than one if two have the same name
	procs    int
	formerly string
	// fences is what the host has claimed, as it knows.
	fences map[string]uint64
}

// A proc is a process of a host.
type proc struct {
	w      *world
	h      *simHost
	n      int
	rate   float64
	offset time.Duration
	paused time.Duration // until then
	killed chan struct{}
	dead   bool
	ids    int
}

func (w *world) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failure == "" {
		w.failure = fmt.Sprintf(format, args...)
	}
}

func (w *world) count(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stats[what]++
}

func (w *world) at(t time.Duration, do func()) {
	w.seq++
	heap.Push(&w.todo, event{t, w.seq, do})
}

type labelKey struct{}

func (p *proc) ask(ctx context.Context, c *call) result {
	if ctx.Err() != nil {
		return result{err: ctx.Err()}
	}
	if !p.call(ctx, c) {
		return result{err: errCrash}
	}
	return p.await(ctx, c)
}

// call begins a call. It reports false if the process is dead.
func (p *proc) call(ctx context.Context, c *call) bool {
	c.p, c.reply = p, make(chan result, 1)
	c.label, _ = ctx.Value(labelKey{}).(string)
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if !p.dead {
		p.w.fresh = append(p.w.fresh, c)
	}
	return !p.dead
}

func (p *proc) await(ctx context.Context, c *call) result {
	select {
	case r := <-c.reply:
		return r
	case <-ctx.Done():
		return result{err: ctx.Err()}
	case <-p.killed:
		return result{err: errCrash}
	}
}

func (p *proc) Now() time.Duration { return p.offset + time.Duration(float64(p.w.now)*p.rate) }

func (p *proc) Sleep(ctx context.Context, d time.Duration) error {
	return p.ask(ctx, &call{op: "sleep", d: max(d, 0)}).err
}

func (p *proc) Load(ctx context.Context, key string, _ int64) ([]byte, blob.Version, error) {
	r := p.ask(ctx, &call{op: "load", key: key})
	return r.body, r.version, r.err
}

func (p *proc) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	r := p.ask(ctx, &call{op: "swap", key: key, old: old, body: body})
	return r.version, r.err
}

func (p *proc) Put(ctx context.Context, key string, body []byte) error {
	return p.ask(ctx, &call{op: "put", key: key, body: body}).err
}

func (p *proc) Delete(ctx context.Context, key string) error {
	return p.ask(ctx, &call{op: "delete", key: key}).err
}

func (p *proc) ReadAt(context.Context, string, []byte, int64) error { panic("not used") }
func (p *proc) List(context.Context, string, func(blob.Info) error) error {
	panic("nothing may depend upon it")
}

// deliver does something in a process as soon as it is not paused.
func (w *world) deliver(p *proc, at time.Duration, do func()) {
	w.at(at, func() {
		if p.paused > w.now {
			w.deliver(p, p.paused+time.Duration(w.rng.IntN(1000)), do)
			return
		}
		do()
	})
}

func (w *world) answer(c *call, at time.Duration, r result) {
	w.deliver(c.p, at, func() { c.reply <- r })
}

func (w *world) upTo(d time.Duration) time.Duration { return time.Duration(w.rng.Int64N(int64(d))) }

// route draws what becomes of a call.
func (w *world) route(c *call) {
	if c.op == "sleep" {
		w.answer(c, w.now+time.Duration(float64(c.d)/c.p.rate)+1, result{})
		return
	}
	d := func() time.Duration {
		if !w.calm && w.rng.IntN(30) == 0 {
			return w.upTo(2 * simTTL)
		}
		return time.Millisecond + w.upTo(30*time.Millisecond)
	}
	there, back := w.now+d(), d()
	if c.p.h.slow > w.now {
		back += w.upTo(simTTL / 3)
	}
	apply := func(answered bool) func() {
		return func() {
			r := w.apply(c)
			if answered {
				w.answer(c, w.now+back, r)
			}
		}
	}
	fate := w.rng.IntN(100)
	if w.narrow && c.op == "swap" && w.rng.IntN(5) == 0 {
		fate = 5 // the answer is lost
	}
	if w.calm {
		fate = 99
	}
	if c.p.h.cut > w.now {
		if fate = 0; c.p.h.leaky {
			fate = w.rng.IntN(6) // now and then it hears, and is not heard
		}
	}
	failed := result{err: errNetwork}
	switch {
	case fate < 5: // the request is lost
		w.answer(c, there+w.upTo(simTTL/2), failed)
	case fate < 10: // the answer is lost
		w.at(there, apply(false))
		w.answer(c, there+w.upTo(simTTL/2), failed)
	case fate < 14: // it comes when its caller has given up
		w.at(w.now+w.upTo(4*simTTL), apply(false))
		w.answer(c, there, failed)
	case fate < 18: // it comes twice
		w.at(there, apply(true))
		w.at(there+w.upTo(4*simTTL), apply(false))
	default:
		w.at(there, apply(true))
	}
}

func versionOf(body []byte) blob.Version {
	h := fnv.New64a()
	_, _ = h.Write(body)
	return blob.Version(strconv.FormatUint(h.Sum64(), 16))
}

// apply does what a call asks of the store.
func (w *world) apply(c *call) result {
	was, ok := w.objects[c.key]
	switch c.op {
	case "load":
		if !ok {
			return result{err: blob.ErrNotFound}
		}
		return result{body: bytes.Clone(was), version: versionOf(was)}
	case "put":
		if ok {
			return result{err: blob.ErrExists}
		}
		w.objects[c.key] = bytes.Clone(c.body)
		w.putUpload(c.key)
	case "delete":
		delete(w.objects, c.key)
		w.deleted[c.key] = true
		w.check()
	case "swap":
		if ok != (c.old != "") || ok && versionOf(was) != c.old {
			return result{err: blob.ErrChanged}
		}
		w.objects[c.key] = bytes.Clone(c.body)
		if id, ok := strings.CutPrefix(c.key, "families/"); ok {
			w.changed(id, c.body)
		}
		return result{version: versionOf(c.body)}
	}
	return result{}
}

func (w *world) putUpload(key string) {
	family, upload, _ := strings.Cut(strings.TrimPrefix(key, "uploads/"), "/")
	if f := w.families[family]; f != nil {
		for _, s := range f.Snapshots {
			if slices.Contains(s.Uploads, upload) && !w.deleted[key] {
				return
			}
		}
	}
	w.orphans[key] = true
}

func ordinal(snapshot string) int {
	n, _ := strconv.Atoi(strings.TrimPrefix(snapshot, "s"))
	return n
}

// changed checks a change of a family.
func (w *world) changed(id string, body []byte) {
	f := new(ledger.Family)
	if err := json.Unmarshal(body, f); err != nil {
		w.fail("the family %s: %v", id, err)
		return
	}
	if old := w.families[id]; old != nil {
		switch {
		case f.Fence < old.Fence:
			w.fail("%s: the fence %d after %d", id, f.Fence, old.Fence)
		case f.Holder != nil && f.Fence == old.Fence && (old.Holder == nil || *old.Holder != *f.Holder):
			w.fail("%s: another holder of the same fence", id)
		case f.Head != "" && f.Snapshots[f.Head].State != ledger.Kept:
			w.fail("%s: the head %q is not kept", id, f.Head)
		case ordinal(f.Head) < ordinal(old.Head) && !f.Deleted:
			w.fail("%s: the head %q after %q", id, f.Head, old.Head)
		case old.Deleted && !f.Deleted && (f.Holder == nil || f.Head != "" || f.Fence <= old.Fence):
			w.fail("%s: it has come back", id)
		case old.Deleted && !f.Deleted:
			w.mu.Lock()
			w.acked[id], w.before[id] = 0, w.snapshot
			w.stats["revived"]++
			w.mu.Unlock()
		}
		if f.Holder != nil && (old.Holder == nil || *old.Holder != *f.Holder) && f.Fence <= old.Fence {
			w.fail("%s: a claim has not made the fence grow", id)
		}
		for s, o := range old.Snapshots {
			if n, ok := f.Snapshots[s]; o.State == ledger.Kept && !ok || o.State == ledger.Gone && ok && n.State != ledger.Gone {
				w.fail("%s: the snapshot %s was %s and is %q", id, s, o.State, n.State)
			}
		}
	}
	if ordinal(f.Head) < w.acked[id] && !f.Deleted {
		w.fail("%s: the head is %q, and %d was committed", id, f.Head, w.acked[id])
	}
	w.families[id] = f
	if f.Holder != nil {
		if w.holders[id] == nil {
			w.holders[id] = map[uint64]string{}
		}
		w.holders[id][f.Fence] = f.Holder.Host
	}
	w.check()
}

// follows checks what a claim says of whether others were in between.
func (w *world) follows(h *simHost, c *ledger.Claim) {
	w.mu.Lock()
	last := h.fences[c.Family()]
	h.fences[c.Family()] = c.Fence()
	w.mu.Unlock()
	if !c.Follows(last) {
		w.count("interrupted")
		return
	}
	for fence := last + 1; fence < c.Fence(); fence++ {
		if other := w.holders[c.Family()][fence]; other != h.name {
			w.fail("%s: the claim %d of %s follows %d, and %s had %d", c.Family(), c.Fence(), h.name, last, other, fence)
		}
	}
}

// check checks that nothing is missing that a kept snapshot needs.
func (w *world) check() {
	for id, f := range w.families {
		for name, s := range f.Snapshots {
			if s.State == ledger.Kept {
				w.whole(id, name)
			}
		}
	}
}

func (w *world) whole(id, name string) {
	s := w.families[id].Snapshots[name]
	for _, u := range s.Uploads {
		if _, ok := w.objects["uploads/"+id+"/"+u]; !ok {
			w.fail("%s/%s is %s, and needs the upload %s, which is not there", id, name, s.State, u)
		}
	}
}

// alone checks that no sandbox runs twice.
func (w *world) alone() {
	if w.wild {
		return
	}
	for id, rs := range w.runs {
		var where []string
		for _, r := range rs {
			if !r.p.dead && r.p.paused <= w.now && ledger.Alive(r.c) {
				where = append(where, fmt.Sprintf("%s.%d (claim %d)", r.p.h.name, r.p.n, r.c.Fence()))
			}
		}
		if len(where) > 1 {
			w.fail("%s runs on %v", id, where)
		}
	}
}

func (w *world) start(h *simHost) {
	h.procs++
	// As far as the clocks may be wrong, and often just so far.
	rate := []float64{0.9, 0.9, 1.1, 1.1, 0.9 + 0.2*w.rng.Float64()}[w.rng.IntN(5)]
	if w.wild {
		rate = []float64{0.2, 1, 5}[w.rng.IntN(3)]
	}
	p := &proc{w: w, h: h, n: h.procs, rate: rate, offset: w.upTo(1000 * simTTL), killed: make(chan struct{})}
	if w.narrow {
		p.rate = []float64{0.9, 1.1, 1.1}[h.index]
	}
	h.p = p
	h.procsUp = slices.DeleteFunc(h.procsUp, func(p *proc) bool { return p.dead })
	formerly := ""
	if w.rng.IntN(2) == 0 && len(h.procsUp) == 0 {
		formerly = h.formerly
	}
	h.procsUp = append(h.procsUp, p)
	go p.main(formerly, w.rng.Uint64())
}

func (w *world) kill(p *proc) {
	w.mu.Lock()
	was := p.dead
	p.dead = true
	w.mu.Unlock()
	if !was {
		close(p.killed)
	}
}

// gremlin makes hosts fail.
func (w *world) gremlin() {
	if !w.calm {
		h, kind := w.hosts[w.rng.IntN(simHosts)], w.rng.IntN(6)
		if w.narrow {
			h, kind = w.hosts[0], []int{1, 1, 2, 3, 3, 3}[kind]
		}
		switch kind {
		case 0:
			h.p.paused = max(h.p.paused, w.now+w.upTo(3*simTTL))
		case 1:
			h.cut = max(h.cut, w.now+simTTL+w.upTo(simTTL))
			h.leaky = w.rng.IntN(3) == 0
		case 2:
			if !h.p.dead {
				w.kill(h.p)
				w.at(w.now+w.upTo(2*simTTL), func() { w.start(h) })
			}
		case 3:
			h.slow = w.now + w.upTo(2*simTTL)
			w.at(h.slow, func() {
				if !w.calm {
					h.cut, h.leaky = max(h.cut, w.now+3*simTTL), false
				}
			})
		case 4:
			// Somebody has given two hosts one name.
			if w.rng.IntN(4) == 0 && !h.p.dead {
				old := h.p
				w.start(h)
				w.at(w.now+w.upTo(4*simTTL), func() { w.kill(old) })
			}
		}
	}
	next := w.now + w.upTo(simTTL)
	if w.narrow {
		next += 2*simTTL + w.upTo(3*simTTL) // so that it has claimed something
	}
	w.at(next, w.gremlin)
}

func (w *world) beginCalm() {
	w.calm = true
	for _, h := range w.hosts {
		h.cut = 0
	}
	began := w.now
	w.at(w.now+simCalm, func() {
		for i, at := range w.claimed {
			if at < began && !w.wild {
				w.fail("nobody could claim %s in the %v after the faults had ended", w.names[i], simCalm)
			}
		}
		w.calm = false
		w.calms++
		w.at(w.now+simChaos, w.beginCalm)
	})
}

// run makes steps until something fails or there were enough.
func (w *world) run(steps int) {
	h := fnv.New64a()
	for ; w.step < steps && w.failure == ""; w.step++ {
		synctest.Wait()
		slices.SortStableFunc(w.fresh, func(a, b *call) int {
			return cmp.Or(cmp.Compare(a.p.h.name, b.p.h.name), cmp.Compare(a.p.n, b.p.n), cmp.Compare(a.label, b.label), cmp.Compare(a.op, b.op),
				cmp.Compare(a.key, b.key), cmp.Compare(a.d, b.d), bytes.Compare(a.body, b.body))
		})
		for _, c := range w.fresh {
			fmt.Fprint(h, w.now, c.p.h.name, c.label, c.op, c.key, c.d, c.old)
			w.route(c)
		}
		w.fresh = nil
		w.alone()
		e := heap.Pop(&w.todo).(event)
		w.now = max(w.now, e.at)
		w.alone() // also just before what happens
		e.do()
	}
	w.hash = h.Sum64()
}

// simulate returns what went wrong.
func simulate(t *testing.T, seed uint64, steps int) *world {
	w := &world{
		seed: seed, wild: seed%4 == 3, narrow: seed%4 == 1, rng: rand.New(rand.NewPCG(seed, 1)), runs: map[string][]running{}, acked: map[string]int{},
		holders: map[string]map[uint64]string{}, before: map[string]int{},
		objects: map[string][]byte{}, families: map[string]*ledger.Family{}, orphans: map[string]bool{}, deleted: map[string]bool{}, stats: map[string]int{},
	}
	synctest.Test(t, func(*testing.T) {
		for i := range w.names {
			w.names[i] = fmt.Sprintf("f%d-0", i)
		}
		for i := range w.hosts {
			w.hosts[i] = &simHost{name: fmt.Sprintf("h%d", i), index: i, fences: map[string]uint64{}}
			w.start(w.hosts[i])
		}
		w.at(simTTL, w.gremlin)
		w.at(simChaos, w.beginCalm)
		w.run(steps)
		for _, h := range w.hosts {
			for _, p := range h.procsUp {
				w.kill(p)
			}
		}
		synctest.Wait()
		if w.failure == "" {
			w.cleanUp()
		}
	})
	return w
}

// cleanUp deletes every sandbox, and checks that nothing is left.
func (w *world) cleanUp() {
	w.calm, w.todo, w.fresh = true, nil, nil
	h := &simHost{name: "cleaner"}
	p := &proc{w: w, h: h, rate: 1, killed: make(chan struct{})}
	done := false
	go func() {
		defer func() { done = true }()
		l := p.open()
		ctx := context.WithValue(context.Background(), labelKey{}, "cleaner")
		s, err := l.Join(ctx, h.name, "")
		if err != nil {
			w.fail("the cleaner: %v", err)
			return
		}
		ids := slices.Sorted(maps.Keys(w.families))
		for _, id := range ids {
			for !w.families[id].Deleted {
				c, err := s.Claim(ctx, id)
				var held *ledger.HeldError
				if errors.As(err, &held) {
					_ = p.Sleep(ctx, held.Wait)
					continue
				}
				if err == nil {
					err = c.Delete(ctx)
				}
				if err != nil {
					w.fail("the cleaner, %s: %v", id, err)
					return
				}
			}
		}
		for _, id := range ids {
			if err := l.Collect(ctx, id, p.del(id)); err != nil {
				w.fail("the cleaner, %s: %v", id, err)
			}
		}
		_ = s.Leave(ctx)
	}()
	for synctest.Wait(); !done; synctest.Wait() {
		for _, c := range w.fresh {
			w.route(c)
		}
		w.fresh = nil
		e := heap.Pop(&w.todo).(event)
		w.now = max(w.now, e.at)
		e.do()
	}
	w.kill(p)
	for id, f := range w.families {
		if len(f.Snapshots) > 0 {
			w.fail("the deleted sandbox %s is no tombstone", id)
		}
	}
	for key := range w.objects {
		if strings.HasPrefix(key, "uploads/") && !w.orphans[key] {
			w.fail("nobody needs %s", key)
		}
	}
}

func (p *proc) open() *ledger.Ledger {
	l, err := ledger.Open(p, ledger.Options{TTL: simTTL, Clock: p})
	if err != nil {
		panic(err)
	}
	ledger.Replace(l, func() string {
		p.w.mu.Lock()
		defer p.w.mu.Unlock()
		p.ids++
		return fmt.Sprintf("%s.%d.%d", p.h.name, p.n, p.ids)
	})
	return l
}

func (p *proc) del(family string) func(context.Context, string) error {
	return func(ctx context.Context, upload string) error { return p.Delete(ctx, "uploads/"+family+"/"+upload) }
}

// main is what a process does: it joins, and again when it is lost.
func (p *proc) main(formerly string, seed uint64) {
	ctx := context.WithValue(context.Background(), labelKey{}, "main")
	l := p.open()
	for !p.dead {
		s, err := l.Join(ctx, p.h.name, formerly)
		if err != nil {
			_ = p.Sleep(ctx, time.Second)
			continue
		}
		p.w.count("sessions")
		goesOn := s.Incarnation() == formerly
		formerly = s.Incarnation()
		p.h.formerly = formerly
		if goesOn {
			p.w.count("sessions gone on with")
			p.settle(context.WithValue(ctx, labelKey{}, "settle"), l, s)
		}
		var workers sync.WaitGroup
		for i := range simWorkers {
			seed += 2
			wk := &worker{p, l, s, rand.New(rand.NewPCG(seed, uint64(i))), map[string][]string{}}
			ctx := context.WithValue(ctx, labelKey{}, fmt.Sprintf("worker%d", i))
			workers.Go(func() {
				for s.Err() == nil && !p.dead {
					wk.work(ctx)
				}
			})
		}
		workers.Wait()
		ledger.Kill(s)
	}
}

// settle gives up what a session holds that another process has begun.
func (p *proc) settle(ctx context.Context, l *ledger.Ledger, s *ledger.Session) {
	p.w.mu.Lock()
	families := slices.Sorted(maps.Keys(p.w.families))
	p.w.mu.Unlock()
	for _, id := range families {
		for s.Err() == nil && !p.dead {
			f, err := l.Family(ctx, id)
			if err == nil && (f.Holder == nil || f.Holder.Incarnation != s.Incarnation()) {
				break
			}
			c, err := s.Claim(ctx, id)
			if err == nil {
				p.w.follows(p.h, c)
				_ = c.Release(ctx) // or the session tries on
				break
			}
			_ = p.Sleep(ctx, time.Second)
		}
	}
}

type worker struct {
	p    *proc
	l    *ledger.Ledger
	s    *ledger.Session
	rng  *rand.Rand
	seen map[string][]string // uploads of families that once were there
}

func (k *worker) sleep(ctx context.Context, d time.Duration) {
	if k.p.w.calm {
		d /= 4
	}
	_ = k.p.Sleep(ctx, time.Duration(k.rng.Int64N(int64(d))))
}

func (k *worker) setRunning(c *ledger.Claim, on bool) {
	w := k.p.w
	w.mu.Lock()
	defer w.mu.Unlock()
	rs := slices.DeleteFunc(w.runs[c.Family()], func(r running) bool { return r.c == c || r.p.dead })
	if on {
		rs = append(rs, running{k.p, c})
	}
	w.runs[c.Family()] = rs
}

// impatient returns a context that sometimes ends soon.
func (k *worker) impatient(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	if k.rng.IntN(4) == 0 {
		d := time.Duration(k.rng.Int64N(int64(simTTL / 5)))
		label, _ := ctx.Value(labelKey{}).(string)
		patience := &call{op: "sleep", d: d}
		// At once: what it is for may be over before a goroutine runs.
		if k.p.call(context.WithValue(ctx, labelKey{}, label+"'s patience"), patience) {
			go func() {
				k.p.await(ctx, patience)
				cancel()
			}()
		}
	}
	return ctx, cancel
}

func (k *worker) work(ctx context.Context) {
	w := k.p.w
	k.sleep(ctx, 2*time.Second)
	i := k.rng.IntN(simFamilies)
	w.mu.Lock()
	family := w.names[i]
	w.mu.Unlock()
	if k.rng.IntN(8) == 0 {
		_ = k.l.Collect(ctx, family, k.p.del(family))
		w.count("collects by others")
		return
	}
	if w.calm && (i+w.calms)%simHosts != k.p.h.index {
		return // so that each sandbox has to move
	}
	var c *ledger.Claim
	var err error
	var held *ledger.HeldError
	keen := k.rng.IntN(3) == 0 // to see the holder's last sign of life as soon as it is there
	for try := k.rng.IntN(6); ; try-- {
		short, cancel := k.impatient(ctx)
		if c, err = k.s.Claim(short, family); errors.Is(err, ledger.ErrDeleted) && k.rng.IntN(2) == 0 {
			c, err = k.s.Create(short, family)
		}
		cancel()
		if !errors.As(err, &held) || held.Wait <= 0 || try <= 0 || k.s.Err() != nil {
			break
		}
		// As soon as ever possible.
		if keen && held.Wait > simTTL/2 && k.rng.IntN(60) > 0 {
			held.Wait = min(held.Wait, simTTL/20)
			try++
		}
		_ = k.p.Sleep(ctx, held.Wait)
		held = nil
		if k.rng.IntN(8) == 0 {
			_ = k.l.Collect(ctx, family, k.p.del(family))
		}
	}
	switch {
	case held != nil:
		w.count("held")
		return
	case errors.Is(err, ledger.ErrDeleted):
		w.mu.Lock()
		if w.names[i] == family {
			_, gen, _ := strings.Cut(family, "-")
			n, _ := strconv.Atoi(gen)
			w.names[i] = fmt.Sprintf("f%d-%d", i, n+1)
		}
		w.mu.Unlock()
		_ = k.l.Collect(ctx, family, k.p.del(family))
		return
	case err != nil:
		w.count("claims failed")
		return
	}
	w.count("claims")
	w.follows(k.p.h, c)
	w.mu.Lock()
	w.claimed[i] = w.now
	w.mu.Unlock()
	k.setRunning(c, true)
	defer k.setRunning(c, false)
	for range k.rng.IntN(4) {
		if c.Err() != nil {
			return
		}
		k.sleep(ctx, simTTL/2)
		switch k.rng.IntN(6) {
		case 0, 1:
			k.push(ctx, c, false)
		case 2:
			k.removeSome(ctx, family)
		case 3:
			_ = k.l.Collect(ctx, family, k.p.del(family))
		}
	}
	if k.rng.IntN(2) == 0 {
		k.sleep(ctx, 4*simTTL)
	}
	k.setRunning(c, false)
	switch n := k.rng.IntN(20); {
	case n < 9:
		if k.push(ctx, c, true) {
			return
		}
	case n < 11:
		if c.Delete(ctx) == nil {
			w.count("deletes")
			if k.rng.IntN(2) == 0 {
				_ = k.l.Collect(ctx, family, k.p.del(family))
			}
			return
		}
	}
	short, cancel := k.impatient(ctx)
	defer cancel()
	_ = c.Release(short)
}

func (k *worker) removeSome(ctx context.Context, family string) {
	f, err := k.l.Family(ctx, family)
	if err != nil {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(f.Snapshots)) {
		if id != f.Head && k.rng.IntN(3) > 0 || k.rng.IntN(10) == 0 {
			_ = k.l.Remove(ctx, family, id)
			k.p.w.count("removes")
		}
	}
}

// push takes a snapshot of a sandbox. It reports whether it is committed.
func (k *worker) push(ctx context.Context, c *ledger.Claim, release bool) bool {
	w := k.p.w
	f, err := k.l.Family(ctx, c.Family())
	if err != nil {
		return false
	}
	var n ledger.Needs
	base := f.Snapshots[f.Head]
	for _, u := range base.Uploads {
		if k.rng.IntN(2) == 0 {
			n.Reused = append(n.Reused, u)
		}
	}
	seen := k.seen[c.Family()]
	if len(seen) > 0 && k.rng.IntN(4) == 0 {
		n.Reused = append(n.Reused, seen[k.rng.IntN(len(seen))])
	}
	w.mu.Lock()
	w.snapshot++
	id := "s" + strconv.Itoa(w.snapshot)
	w.mu.Unlock()
	for i := range k.rng.IntN(3) {
		n.Fresh = append(n.Fresh, fmt.Sprintf("%s.%d", id, i))
	}
	if k.rng.IntN(2) == 0 {
		k.sleep(ctx, simTTL/4)
	}
	if err := c.Intend(ctx, id, n); err != nil {
		var condemned *ledger.CondemnedError
		if errors.As(err, &condemned) {
			w.count("condemned")
		}
		return false
	}
	k.seen[c.Family()] = append(seen, n.Fresh...)
	for _, u := range n.Fresh {
		for try := 0; ; try++ {
			if c.Err() != nil || try == 4 {
				return false
			}
			if err := k.p.Put(ctx, "uploads/"+c.Family()+"/"+u, []byte(u)); err == nil || errors.Is(err, blob.ErrExists) {
				break
			}
		}
	}
	for range 3 {
		short, cancel := k.impatient(ctx)
		err = c.Commit(short, id, release)
		cancel()
		if err == nil {
			w.count("commits")
			w.mu.Lock()
			if n := ordinal(id); n > w.before[c.Family()] {
				w.acked[c.Family()] = max(w.acked[c.Family()], n)
			}
			w.mu.Unlock()
			return true
		}
	}
	return false
}

func envUint(t *testing.T, name string, otherwise uint64) uint64 {
	s := os.Getenv(name)
	if s == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatal(name, err)
	}
	return n
}

// simSteps is how many steps a run has: after each all sandboxes are deleted, and nothing may be left.
const simSteps = 5000

func TestSim_hosts_that_fail_lose_no_sandbox_and_run_none_twice(t *testing.T) {
	steps, seed := envUint(t, "DROWSE_SIM_STEPS", 300_000), envUint(t, "DROWSE_SIM_SEED", 1)
	stats := map[string]int{}
	for done := uint64(0); done < steps; seed++ {
		w := simulate(t, seed, simSteps)
		for what, n := range w.stats {
			stats[what] += n
		}
		if w.failure != "" {
			t.Fatalf("step %d, at %v: %s\nDROWSE_SIM_SEED=%d DROWSE_SIM_STEPS=1 repeats it", w.step, w.now, w.failure, seed)
		}
		done += simSteps
	}
	t.Log(stats)
	for _, what := range []string{"claims", "claims failed", "held", "commits", "deletes", "condemned", "removes", "sessions", "sessions gone on with", "revived", "interrupted"} {
		if stats[what] == 0 && steps >= 100_000 {
			t.Errorf("the simulation has no %s", what)
		}
	}
}

func TestSim_a_seed_repeats_a_run(t *testing.T) {
	a, b := simulate(t, 7, simSteps), simulate(t, 7, simSteps)
	if a.hash != b.hash || a.now != b.now {
		t.Errorf("%x at %v, then %x at %v", a.hash, a.now, b.hash, b.now)
	}
}
