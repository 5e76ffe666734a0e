package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
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

// The simulation of scale runs the package's own code for as many hosts and wakes as are asked for, on a store with the
// times and limits that Amazon states for S3. A third of the hosts dies at once. It prints what the store is asked, and
// how long users wait for a claim.

const (
	// A prefix of keys takes so many requests a second before it is partitioned, and refuses the others with 503.
	prefixWrites = 3500
	prefixReads  = 5500
	// Beyond the time to live of the dead third's sessions, twice.
	scaleCalm, scaleAfter = time.Minute, 90 * time.Second
	// scalePuts is how many objects a sleep puts beside the ledger's.
	scalePuts = 3
	// scaleStays is the share, in percent, of wakes on the host where the sandbox slept.
	scaleStays = 70
)

// The client of S3 repeats what is refused.
const (
	clientTries = 4
	clientPause = 200 * time.Millisecond
)

var errSlowDown = errors.New("503 SlowDown")

type object struct {
	body    []byte
	version uint64
}

// bucket is a store in memory with the limits of S3.
type bucket struct {
	blob.Store // the ledger needs nothing else of it
	mu         sync.Mutex
	objects    map[string]object
	begun      time.Time
	second     int64
	now        map[string]int // requests of this second, by prefix and kind
	total      map[string]int
	peak       map[string]int
	refused    int
}

func (b *bucket) ask(kind, key string, limit int, low, high time.Duration) error {
	prefix, _, _ := strings.Cut(key, "/")
	for try := 0; ; try++ {
		b.mu.Lock()
		if s := int64(time.Since(b.begun) / time.Second); s != b.second {
			b.second = s
			clear(b.now)
		}
		what := kind + " " + prefix
		b.now[what]++
		b.total[what]++
		b.peak[what] = max(b.peak[what], b.now[what])
		over := b.now[what] > limit
		if over {
			b.refused++
		}
		b.mu.Unlock()
		time.Sleep(low + rand.N(high-low))
		if !over {
			return nil
		}
		if try == clientTries {
			return errSlowDown
		}
		time.Sleep(rand.N(clientPause << try)) // as the client of S3 does
	}
}

func (b *bucket) Load(_ context.Context, key string, _ int64) ([]byte, blob.Version, error) {
	if err := b.ask("reads", key, prefixReads, 10*time.Millisecond, 30*time.Millisecond); err != nil {
		return nil, "", err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	o, ok := b.objects[key]
	if !ok {
		return nil, "", blob.ErrNotFound
	}
	return o.body, blob.Version(strconv.FormatUint(o.version, 10)), nil
}

func (b *bucket) Swap(_ context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	if err := b.ask("writes", key, prefixWrites, 20*time.Millisecond, 60*time.Millisecond); err != nil {
		return "", err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	o, ok := b.objects[key]
	if ok != (old != "") || ok && strconv.FormatUint(o.version, 10) != string(old) {
		return "", blob.ErrChanged
	}
	o = object{body, o.version + 1}
	b.objects[key] = o
	return blob.Version(strconv.FormatUint(o.version, 10)), nil
}

func (b *bucket) Put(_ context.Context, key string, _ []byte) error {
	return b.ask("writes", key, prefixWrites, 20*time.Millisecond, 60*time.Millisecond)
}

type scaleHost struct {
	name string
	l    *ledger.Ledger
	s    *ledger.Session
	dead bool // guarded by fleet.mu
}

type fleet struct {
	t      *testing.T
	store  *bucket
	mu     sync.Mutex // guards what follows, and dead
	hosts  []*scaleHost
	place  map[int]*scaleHost // where a sandbox slept last
	runs   map[int]*scaleHost // who has it, as far as the living know
	heads  map[int]string     // what was committed last
	sleeps int
	left   map[int]time.Time // sandboxes of the dead third, since when
	// waits are for claims: calm, and after the hosts have died.
	waits, again []time.Duration
	failed       map[string]int
}

func (f *fleet) living() *scaleHost {
	for {
		if h := f.hosts[rand.N(len(f.hosts))]; !h.dead {
			return h
		}
	}
}

// use wakes a sandbox that sleeps, works in it, and puts it to sleep.
func (f *fleet) use(ctx context.Context, box int) {
	f.mu.Lock()
	if f.runs[box] != nil {
		f.mu.Unlock()
		return
	}
	h := f.place[box]
	if h == nil || h.dead || rand.N(100) >= scaleStays {
		h = f.living()
	}
	f.runs[box] = h
	f.mu.Unlock()
	asked := time.Now()
	c := f.claim(ctx, h, box)
	f.mu.Lock()
	if c == nil || h.dead {
		if f.runs[box] == h {
			delete(f.runs, box)
		}
		f.mu.Unlock()
		return
	}
	if at, ok := f.left[box]; ok {
		f.again = append(f.again, time.Since(at))
		delete(f.left, box)
	} else if len(f.left) == 0 && len(f.again) == 0 {
		f.waits = append(f.waits, time.Since(asked))
	}
	if c.Head() != f.heads[box] {
		f.t.Errorf("sandbox %d: the head is %q, and %q was committed", box, c.Head(), f.heads[box])
	}
	f.mu.Unlock()
	time.Sleep(10*time.Second + rand.N(20*time.Second))
	f.mu.Lock()
	f.sleeps++
	dead, id := h.dead, fmt.Sprintf("s%d", f.sleeps)
	f.mu.Unlock()
	if dead {
		return
	}
	err := f.sleep(ctx, h, c, box, id)
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case err == nil, h.dead:
	case errors.Is(err, errSlowDown):
		f.failed["sleep, refused by the store"]++
	default:
		f.t.Error(err)
	}
}

func (f *fleet) claim(ctx context.Context, h *scaleHost, box int) *ledger.Claim {
	for {
		c, err := h.s.Claim(ctx, fmt.Sprint(box))
		if err == nil {
			return c
		}
		wait := 100*time.Millisecond + rand.N(400*time.Millisecond)
		var held *ledger.HeldError
		if errors.As(err, &held) {
			wait += held.Wait
		} else if errors.Is(err, ledger.ErrLost) {
			return nil
		}
		f.mu.Lock()
		dead := h.dead
		if held == nil {
			f.failed["claim, refused by the store"]++
		}
		f.mu.Unlock()
		if dead {
			return nil
		}
		time.Sleep(wait)
	}
}

func (f *fleet) sleep(ctx context.Context, h *scaleHost, c *ledger.Claim, box int, id string) error {
	again := func(do func() error) (err error) {
		for range 10 {
			if err = do(); err == nil || errors.Is(err, ledger.ErrReleased) || errors.Is(err, ledger.ErrLost) {
				return err
			}
			time.Sleep(rand.N(time.Second))
		}
		return err
	}
	if err := again(func() error { return c.Intend(ctx, id, ledger.Needs{Fresh: []string{id}}) }); err != nil {
		return err
	}
	for i := range scalePuts {
		kind := "data/"
		if i == 0 {
			kind = "heads/"
		}
		if err := again(func() error { return f.store.Put(ctx, kind+id, nil) }); err != nil {
			return err
		}
	}
	f.mu.Lock()
	if h.dead {
		f.mu.Unlock()
		return nil
	}
	f.mu.Unlock()
	if err := again(func() error { return c.Commit(ctx, id, true) }); err != nil {
		return err
	}
	f.mu.Lock()
	f.heads[box], f.place[box] = id, h
	delete(f.runs, box)
	f.mu.Unlock()
	return h.l.Collect(ctx, fmt.Sprint(box), func(context.Context, string) error { return nil })
}

// die kills every third host. Users of what they ran ask for it elsewhere at once.
func (f *fleet) die(ctx context.Context, users *sync.WaitGroup) (lost int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, h := range f.hosts {
		if h.dead = i%3 == 0; h.dead {
			go ledger.Kill(h.s)
		}
	}
	for box, h := range f.runs {
		if !h.dead {
			continue
		}
		lost++
		f.left[box] = time.Now()
		delete(f.runs, box)
		users.Go(func() { f.use(ctx, box) })
	}
	return lost
}

func percentiles(d []time.Duration) string {
	if len(d) == 0 {
		return "none"
	}
	slices.Sort(d)
	at := func(p int) time.Duration { return d[min(len(d)*p/100, len(d)-1)].Round(time.Millisecond) }
	return fmt.Sprintf("%d, p50 %v, p99 %v, max %v", len(d), at(50), at(99), at(100))
}

func TestScale_of_hosts_and_wakes_with_a_third_of_the_hosts_dying(t *testing.T) {
	hosts, wakes, boxes := int(envUint(t, "DROWSE_SIM_HOSTS", 150)), int(envUint(t, "DROWSE_SIM_WAKES", 15)), int(envUint(t, "DROWSE_SIM_SANDBOXES", 20_000))
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		b := &bucket{objects: map[string]object{}, begun: time.Now(), now: map[string]int{}, total: map[string]int{}, peak: map[string]int{}}
		f := &fleet{t: t, store: b, place: map[int]*scaleHost{}, runs: map[int]*scaleHost{}, heads: map[int]string{}, left: map[int]time.Time{}, failed: map[string]int{}}
		var joins sync.WaitGroup
		for i := range hosts {
			l, err := ledger.Open(b, ledger.Options{Clock: bubble{time.Now()}})
			must(t, err)
			h := &scaleHost{name: fmt.Sprintf("h%d", i), l: l}
			f.hosts = append(f.hosts, h)
			joins.Go(func() {
				time.Sleep(rand.N(ledger.DefaultTTL / 3)) // or all renew at once
				s, err := l.Join(ctx, h.name, "")
				must(t, err)
				h.s = s
			})
		}
		joins.Wait()
		var users sync.WaitGroup
		begin := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second / time.Duration(wakes)) {
				users.Go(func() { f.use(ctx, rand.N(boxes)) })
			}
		}
		begin(scaleCalm / 2)
		b.mu.Lock()
		clear(b.total)
		clear(b.peak)
		b.refused = 0
		b.mu.Unlock()
		begin(scaleCalm)
		report := func(what string, d time.Duration) {
			b.mu.Lock()
			defer b.mu.Unlock()
			for _, k := range slices.Sorted(maps.Keys(b.total)) {
				t.Logf("%s: %-16s %8.1f a second, at most %d", what, k, float64(b.total[k])/d.Seconds(), b.peak[k])
			}
			t.Logf("%s: %d requests refused", what, b.refused)
			clear(b.total)
			clear(b.peak)
			b.refused = 0
		}
		report("calm", scaleCalm)
		lost := f.die(ctx, &users)
		begin(scaleAfter)
		report("a third dead", scaleAfter)
		users.Wait()
		t.Logf("%d hosts, %d wakes a second: claims while all is calm: %s", hosts, wakes, percentiles(f.waits))
		t.Logf("%d sandboxes of dead hosts; claimed again after the death: %s", lost, percentiles(f.again))
		t.Logf("tried again: %v", f.failed)
		if len(f.left) > 0 || len(f.again) != lost || lost == 0 {
			t.Errorf("%d of %d sandboxes of dead hosts were claimed again, %d were not", len(f.again), lost, len(f.left))
		}
		for _, h := range f.hosts {
			if !h.dead {
				joins.Go(func() { _ = h.s.Leave(ctx) })
			}
		}
		joins.Wait()
	})
}
