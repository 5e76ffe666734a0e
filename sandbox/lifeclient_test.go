package sandbox_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// lifeArg makes the test binary a client of the long run or its supervisor. Each is its own process, so that it
// can be killed.
const lifeArg = "life"

// lifeRun is the configuration of client and supervisor.
type lifeRun struct {
	Store, Agent, Snapshot string
	Sandboxes              int
	// Kills is set while processes are killed: operations may fail, and clients try them again.
	Kills bool
	Seed  uint64
	// Patience bounds one operation.
	Patience time.Duration
}

func lifeName(i int) string { return "life-" + strconv.Itoa(i) }

// lifeProcess runs a client or the supervisor and returns its exit code.
func lifeProcess(dir, role string) int {
	err := func() error {
		b, err := os.ReadFile(filepath.Join(dir, "run.json"))
		if err != nil {
			return err
		}
		var run lifeRun
		if err := json.Unmarshal(b, &run); err != nil {
			return err
		}
		s, err := sandbox.Open(run.Store)
		if err != nil {
			return err
		}
		self, err := os.Executable()
		if err != nil {
			return err
		}
		l := pool.Launcher{Command: guesttest.VMCommand(self), Agent: run.Agent}
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
		defer stop()
		if role == "serve" {
			// For a moment a process of a killed supervisor may still be at the pool's socket.
			return supervisor.Run(ctx, s, l, supervisor.Options{Pool: 2, PruneEvery: 10 * time.Second, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
		}
		n, err := strconv.Atoi(role)
		if err != nil {
			return err
		}
		c := lifeClient{lifeRun: run, store: s, l: l, dir: lifeFiles(dir), rand: rand.New(rand.NewPCG(run.Seed, uint64(n)<<32|uint64(os.Getpid())))}
		for ctx.Err() == nil {
			if err := c.once(); err != nil {
				return err
			}
		}
		return nil
	}()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s of %s: %v\n", role, dir, err)
		return 1
	}
	return 0
}

type lifeClient struct {
	lifeRun
	store *sandbox.Host
	l     pool.Launcher
	dir   lifeFiles
	rand  *rand.Rand
}

// lifeTries is how often a client tries an operation while processes are killed.
const lifeTries = 40

// try calls do, which must be repeatable. Without kills it must succeed at once.
func (c *lifeClient) try(what string, do func(ctx context.Context) error) error {
	for i := 1; ; i++ {
		ctx, cancel := context.WithTimeout(context.Background(), c.Patience)
		err := do(ctx)
		cancel()
		if err == nil {
			return nil
		}
		if !c.Kills || i == lifeTries {
			return fmt.Errorf("%s, tried %d times: %w", what, i, err)
		}
		if nerr := c.dir.note("all", "again"); nerr != nil {
			return nerr
		}
		time.Sleep(time.Duration(i) * 20 * time.Millisecond)
	}
}

// once does one operation on a random sandbox.
func (c *lifeClient) once() error {
	name := lifeName(c.rand.IntN(c.Sandboxes))
	if c.rand.IntN(10) == 0 {
		// This wake takes no lock, whatever another client does at the moment.
		ctx, cancel := context.WithTimeout(context.Background(), c.Patience)
		defer cancel()
		_, err := c.store.With(c.l).Sandbox(name).Wake(ctx)
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) && !c.Kills && !c.busy(name) {
			return fmt.Errorf("waking %s beside others: %w", name, err)
		}
		return c.dir.note("all", "wakes")
	}
	lock, err := c.dir.lock(name, false)
	if err != nil || lock == nil {
		return err
	}
	defer lock.Close()
	return c.work(name)
}

// busy reports whether another client holds the sandbox, which may remove it.
func (c *lifeClient) busy(name string) bool {
	lock, err := c.dir.lock(name, false)
	if lock != nil {
		lock.Close()
	}
	return err == nil && lock == nil
}

// work is done by the holder of the sandbox's lock.
func (c *lifeClient) work(name string) error {
	m, err := c.settled(name)
	if err != nil {
		return err
	}
	for range 1 + c.rand.IntN(3) {
		if err := c.add(name, m, true); err != nil {
			return err
		}
	}
	switch n := c.rand.IntN(100); {
	case n < 8:
		err = c.fork(name, m)
	case n < 12:
		return c.renew(name, m)
	case n < 20:
		return nil // the sandbox stays awake
	}
	if err != nil {
		return err
	}
	return c.sleep(name, m)
}

// settled finishes the operation of a client that was killed.
func (c *lifeClient) settled(name string) (*lifeModel, error) {
	m, err := c.dir.load(name)
	if err != nil {
		return nil, err
	}
	switch m.Doing {
	case "":
	case lifeFork:
		if err := c.remove(name + "-f"); err != nil {
			return nil, err
		}
	case lifeDelete, lifeMake:
		return &m, c.renew(name, &m)
	default:
		m.unknown()
	}
	m.Doing = ""
	return &m, c.dir.save(name, &m)
}

func (c *lifeClient) doing(name string, m *lifeModel, what string) error {
	m.Doing = what
	return c.dir.save(name, m)
}

// done saves m with no operation under way, and counts the operation.
func (c *lifeClient) done(name string, m *lifeModel, count string) error {
	m.Doing = ""
	return errors.Join(c.dir.save(name, m), c.dir.note("all", count))
}

// add asks the guest, which it wakes first. The guest's own two counts must agree.
func (c *lifeClient) add(name string, m *lifeModel, one bool) error {
	what, question := "asking", "="
	if one {
		what, question = "adding", "+"
	}
	return c.try(what+" in "+name, func(ctx context.Context) error {
		if _, err := c.store.With(c.l).Sandbox(name).Wake(ctx); err != nil {
			return err
		}
		conn, err := c.store.Sandbox(name).Agent(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		to, err := conn.Dial(ctx, "tcp", "127.0.0.1:8000")
		if err != nil {
			return err
		}
		defer to.Close()
		if until, ok := ctx.Deadline(); ok {
			if err := to.SetDeadline(until); err != nil {
				return err
			}
		}
		before, err := c.dir.count(name, "kills")
		if err != nil {
			return err
		}
		if one {
			m.killed(before)
			if err := c.doing(name, m, lifeAdd); err != nil {
				return err
			}
		}
		n, file, err := askTally(to, question)
		kills, kerr := c.dir.count(name, "kills")
		if err != nil || kerr != nil {
			if one {
				m.unknown()
				err = errors.Join(err, c.doing(name, m, ""))
			}
			return errors.Join(err, kerr)
		}
		if n != file {
			return c.wrong(fmt.Errorf("%s has %d in memory and %d in its file", name, n, file))
		}
		if err := m.said(n, one, before, kills); err != nil {
			return c.wrong(fmt.Errorf("%s: %w", name, err))
		}
		if one {
			return c.done(name, m, "adds")
		}
		return c.dir.save(name, m)
	})
}

func askTally(to io.ReadWriter, question string) (n, file int, err error) {
	if _, err := to.Write([]byte(question)); err != nil {
		return 0, 0, err
	}
	line, err := bufio.NewReader(to).ReadString('\n')
	if err != nil {
		return 0, 0, err
	}
	return readTally(line)
}

// readTally parses the answer of tally: its count in memory and the one in its file. The latter has leading zeros
// and is decimal.
func readTally(line string) (n, file int, err error) {
	_, err = fmt.Sscanf(line, "%d %d\n", &n, &file)
	return n, file, err
}

func TestReadTally_takes_numbers_with_leading_zeros_as_decimal(t *testing.T) {
	t.Parallel()
	for line, want := range map[string][2]int{"7 000000000007\n": {7, 7}, "8 000000000008\n": {8, 8}, "10 000000000010\n": {10, 10}, "8 000000000000\n": {8, 0}} {
		if n, file, err := readTally(line); err != nil || [2]int{n, file} != want {
			t.Errorf("%q says %d and %d (%v), want %v", line, n, file, err, want)
		}
	}
	for _, line := range []string{"", "8\n", "8 \x00\x00\n"} {
		if n, file, err := readTally(line); err == nil {
			t.Errorf("%q says %d and %d", line, n, file)
		}
	}
}

// wrong records an error that no retry can repair.
func (c *lifeClient) wrong(err error) error {
	f, ferr := os.OpenFile(c.dir.path("all", "wrong"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if ferr != nil {
		return errors.Join(err, ferr)
	}
	_, ferr = fmt.Fprintln(f, strings.ReplaceAll(err.Error(), "\n", " "))
	return errors.Join(err, ferr, f.Close())
}

func (c *lifeClient) sleep(name string, m *lifeModel) error {
	return c.try("putting "+name+" to sleep", func(ctx context.Context) error {
		before, err := c.dir.count(name, "kills")
		if err != nil {
			return err
		}
		m.killed(before)
		if err := c.doing(name, m, lifeSleep); err != nil {
			return err
		}
		_, serr := c.store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{})
		kills, err := c.dir.count(name, "kills")
		if err != nil {
			return err
		}
		if serr != nil {
			m.unknown()
			m.killed(kills)
			m.Doing = ""
			return errors.Join(serr, c.dir.save(name, m))
		}
		m.slept(kills)
		return c.done(name, m, "sleeps")
	})
}

// fork makes a child, has it count on from its parent's count, and removes it.
func (c *lifeClient) fork(name string, m *lifeModel) error {
	child := name + "-f"
	// The parent's count does not depend on the child's fate.
	if err := c.doing(name, m, lifeFork); err != nil {
		return err
	}
	kid := lifeModel{}
	err := c.try("forking "+name, func(ctx context.Context) error {
		if err := c.remove(child); err != nil {
			return err
		}
		if _, err := c.store.With(c.l).Sandbox(name).Wake(ctx); err != nil {
			return err
		}
		before, err := c.dir.count(name, "kills")
		if err != nil {
			return err
		}
		m.killed(before)
		res, err := c.store.With(c.l).Sandbox(name).Fork(ctx, sandbox.ForkOptions{Name: child})
		if err != nil {
			return err
		}
		if !res.Durable {
			return fmt.Errorf("the fork of %s is not on disk: %s", name, res.Problem)
		}
		kills, err := c.dir.count(name, "kills")
		if err != nil {
			return err
		}
		m.killed(kills)
		mine, err := c.dir.count(child, "kills")
		if err != nil {
			return err
		}
		kid = lifeModel{Now: m.Now, Slept: m.Now, Kills: mine}
		return c.dir.save(child, &kid)
	})
	if err == nil {
		err = c.add(child, &kid, true)
	}
	if err == nil {
		err = c.add(child, &kid, false)
	}
	if err != nil {
		return err
	}
	if err := c.remove(child); err != nil {
		return err
	}
	return c.done(name, m, "forks")
}

func (c *lifeClient) remove(name string) error {
	return c.try("removing "+name, func(ctx context.Context) error {
		err := c.store.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: true})
		if errors.Is(err, sandbox.ErrNotFound) {
			return nil
		}
		return err
	})
}

// renew removes a sandbox and makes a new one with its name.
func (c *lifeClient) renew(name string, m *lifeModel) error {
	if err := c.doing(name, m, lifeDelete); err != nil {
		return err
	}
	if err := c.remove(name); err != nil {
		return err
	}
	if _, err := c.store.State.Get(name); !errors.Is(err, sandbox.ErrNotFound) {
		return c.wrong(fmt.Errorf("%s was removed, and is there: %w", name, err))
	}
	if err := errors.Join(c.dir.note("all", "deletes"), c.make(name)); err != nil {
		return err
	}
	*m, _ = c.dir.load(name)
	return nil
}

// make clones a sandbox and puts it to sleep.
func (c *lifeClient) make(name string) error {
	kills, err := c.dir.count(name, "kills")
	if err != nil {
		return err
	}
	m := &lifeModel{Now: []int{0}, Slept: []int{0}, Kills: kills}
	if err := c.doing(name, m, lifeMake); err != nil {
		return err
	}
	err = c.try("making "+name, func(ctx context.Context) error {
		if err := c.remove(name); err != nil {
			return err
		}
		_, err := c.store.With(c.l).Clone(ctx, c.Snapshot, sandbox.CloneOptions{Name: name})
		return err
	})
	if err != nil {
		return err
	}
	if err := c.done(name, m, "makes"); err != nil {
		return err
	}
	return c.sleep(name, m)
}
