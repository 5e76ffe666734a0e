//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/pool"
)

// demoResult is the result of the demo.
type demoResult struct {
	SamePID         bool               `json:"same_pid"`
	SameValue       bool               `json:"same_value"`
	FilesOK         bool               `json:"files_ok"`
	ClockErrorMs    float64            `json:"clock_error_ms"`
	DistinctEntropy bool               `json:"distinct_entropy"`
	ProcessGone     bool               `json:"process_gone"`
	BytesRaw        uint64             `json:"bytes_raw"`
	BytesStored     int64              `json:"bytes_stored"`
	Faults          uint64             `json:"faults"`
	MiBTouched      float64            `json:"mib_touched"`
	StagesMs        map[string]float64 `json:"stages_ms"`
}

func (r demoResult) ok() bool {
	return r.SamePID && r.SameValue && r.FilesOK && r.DistinctEntropy && r.ProcessGone && r.ClockErrorMs < maxClockError
}

// maxClockError is the largest accepted error of the guest's clock after a wake, in milliseconds.
const maxClockError = 1000

// demoProgram holds a value in memory. It writes the value and its pid to each reader of a named pipe.
const demoProgram = `
import os, random
value = random.SystemRandom().getrandbits(128)
while True:
    open('/run/demo.ask').read()
    with open('/run/demo.answer', 'w') as f:
        f.write('%d %032x\n' % (os.getpid(), value))
`

func (a *app) demoCommand() *cobra.Command {
	var spec sandbox.Spec
	cmd := &cobra.Command{
		Use: "demo", Annotations: makesState,
		Short: "Boot a VM, run a program, sleep, wake, and check that nothing has changed",
		Args:  cobra.NoArgs,
		RunE: a.onHost(func(cmd *cobra.Command, _ []string, s *sandbox.Host) error {
			l, err := a.launcher()
			if err != nil {
				return err
			}
			d := &demo{app: a, store: s, launcher: l, spec: spec, result: demoResult{StagesMs: map[string]float64{}}}
			err = d.run(cmd.Context())
			if err == nil {
				err = a.print(d.result, d.text)
			}
			err = errors.Join(err, d.cleanUp(context.WithoutCancel(cmd.Context())))
			if err == nil && !d.result.ok() {
				return errors.New("the demo ran, and not everything came back as it was")
			}
			return err
		}),
	}
	f := cmd.Flags()
	f.StringVar(&spec.Image, "image", "debian-python", "image of the guest; it needs python3")
	f.StringVar(&spec.Kernel, "kernel", "", "kernel of the guest, as for run")
	f.IntVar(&spec.VCPUs, "vcpus", 0, "number of CPUs")
	f.VarP((*mebibytes)(&spec.MemoryMiB), "memory", "m", "RAM, such as 1g; a number alone is MiB")
	return cmd
}

type demo struct {
	app      *app
	store    *sandbox.Host
	launcher pool.Launcher
	spec     sandbox.Spec
	vms      []string
	result   demoResult
}

func (d *demo) say(format string, args ...any) { d.app.log.Info(fmt.Sprintf(format, args...)) }

func (d *demo) stages(m map[string]float64, names ...string) {
	for _, n := range names {
		if v, ok := m[n]; ok {
			d.result.StagesMs[n] = v
		}
	}
}

func (d *demo) run(ctx context.Context) error {
	name := fmt.Sprintf("demo-%d", os.Getpid())
	d.spec.Name = name
	d.say("booting %s", name)
	d.vms = append(d.vms, name)
	var rep control.Report
	if _, err := d.store.With(d.launcher).Create(ctx, d.spec, sandbox.CreateOptions{Report: &rep}); err != nil {
		return err
	}
	d.stages(rep.Stages, "boot")
	r, err := d.store.State.Get(name)
	if err != nil {
		return err
	}
	pid := r.PID

	d.say("starting a python program that holds a random value")
	before, digest, err := d.prepare(ctx, name)
	if err != nil {
		return err
	}

	d.say("putting it to sleep")
	slept, err := d.store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{})
	if err != nil {
		return err
	}
	d.stages(slept.Stages, "pause", "save", "sleep", "gone")
	d.result.BytesRaw, d.result.BytesStored = slept.BytesRaw, slept.BytesStored
	d.result.ProcessGone = gone(pid)

	d.say("waking it")
	begin := time.Now()
	rep, err = d.store.With(d.launcher).Sandbox(name).Wake(ctx)
	if err != nil {
		return err
	}
	d.result.StagesMs["wake"] = float64(time.Since(begin).Microseconds()) / 1000
	d.stages(rep.Stages, "resume_entry", "resume_ready", "import")
	if err := d.check(ctx, name, before, digest); err != nil {
		return err
	}

	d.say("putting it to sleep and waking it again")
	if slept, err = d.store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{}); err != nil {
		return err
	}
	if rep, err = d.store.With(d.launcher).Sandbox(name).Wake(ctx); err != nil {
		return err
	}
	d.result.StagesMs["ready_again"] = rep.Stages["resume_ready"]
	if err := d.check(ctx, name, before, digest); err != nil {
		return err
	}

	d.say("making two more machines from the same snapshot")
	return d.clones(ctx, slept.Snapshot)
}

// gone reports whether a process has ended. It waits a moment, since this process is the parent and reaps it.
func gone(pid int) bool {
	for range 100 {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); errors.Is(err, os.ErrNotExist) {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

// prepare starts the program and writes a file. It returns the program's answer and the hash of the file.
func (d *demo) prepare(ctx context.Context, name string) (answer, digest string, err error) {
	c, err := d.store.Sandbox(name).Agent(ctx)
	if err != nil {
		return "", "", err
	}
	defer c.Close()
	data := make([]byte, 1<<20)
	if _, err := rand.Read(data); err != nil {
		return "", "", err
	}
	for path, content := range map[string][]byte{"/root/demo.bin": data, "/root/demo.py": []byte(demoProgram)} {
		if err := c.WriteFile(ctx, path, bytes.NewReader(content), guest.WriteOptions{}); err != nil {
			return "", "", err
		}
	}
	if _, err := sh(ctx, c, "mkfifo /run/demo.ask /run/demo.answer"); err != nil {
		return "", "", err
	}
	p, err := c.Start(ctx, guest.Cmd{Argv: []string{"python3", "/root/demo.py"}, Detach: true})
	if err != nil {
		return "", "", fmt.Errorf("starting python3: %w", err)
	}
	if err := p.Close(); err != nil {
		return "", "", err
	}
	answer, err = ask(ctx, c)
	sum := sha256.Sum256(data)
	return answer, hex.EncodeToString(sum[:]), err
}

func ask(ctx context.Context, c *guest.Client) (string, error) {
	return sh(ctx, c, "echo > /run/demo.ask; cat /run/demo.answer")
}

// sh runs a shell command and returns its output.
func sh(ctx context.Context, c *guest.Client, script string) (string, error) {
	var out, errs bytes.Buffer
	cmd := guest.Cmd{Argv: []string{"/bin/sh", "-c", script}, Timeout: time.Minute}
	cmd.Stdout, cmd.Stderr = &out, &errs
	if _, err := c.Exec(ctx, cmd); err != nil {
		return "", fmt.Errorf("running %q in the guest: %w: %s", script, err, strings.TrimSpace(errs.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// check compares the machine that woke with the one that fell asleep.
func (d *demo) check(ctx context.Context, name, before, digest string) error {
	c, err := d.store.Sandbox(name).Agent(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	sent := time.Now()
	date, err := sh(ctx, c, "date +%s%N")
	if err != nil {
		return err
	}
	received := time.Now()
	ns, err := strconv.ParseInt(date, 10, 64)
	if err != nil {
		return fmt.Errorf("reading the guest's date: %w", err)
	}
	d.result.ClockErrorMs = clockError(time.Unix(0, ns), sent, received)
	d.say("asking the program again")
	after, err := ask(ctx, c)
	if err != nil {
		return err
	}
	pid0, value0, _ := strings.Cut(before, " ")
	pid1, value1, _ := strings.Cut(after, " ")
	d.result.SamePID = pid0 != "" && pid0 == pid1
	d.result.SameValue = value0 != "" && value0 == value1
	h := sha256.New()
	if _, err := c.ReadFile(ctx, "/root/demo.bin", h, 0, 0); err != nil {
		return err
	}
	d.result.FilesOK = hex.EncodeToString(h.Sum(nil)) == digest
	info, err := d.store.Sandbox(name).Info(ctx)
	if err != nil {
		return err
	}
	d.result.Faults, d.result.MiBTouched = info.Faults, info.MiBTouched
	return nil
}

// clockError returns how far t lies outside of [sent, received], in milliseconds.
func clockError(t, sent, received time.Time) float64 {
	switch {
	case t.Before(sent):
		return float64(sent.Sub(t).Microseconds()) / 1000
	case t.After(received):
		return float64(t.Sub(received).Microseconds()) / 1000
	}
	return 0
}

// clones wakes the snapshot twice more and compares what should differ: random bytes, a random UUID, the seed of
// address randomisation, and the boot id.
func (d *demo) clones(ctx context.Context, snapshot string) error {
	const look = "od -An -tx1 -N32 /dev/urandom | tr -d ' \\n'; echo; cat /proc/sys/kernel/random/uuid; LD_SHOW_AUXV=1 /bin/true | grep AT_RANDOM; cat /proc/sys/kernel/random/boot_id"
	var seen [2][]string
	for i := range seen {
		name := fmt.Sprintf("demo-%d-%c", os.Getpid(), 'a'+i)
		d.vms = append(d.vms, name)
		if _, err := d.store.With(d.launcher).Clone(ctx, snapshot, sandbox.CloneOptions{Name: name}); err != nil {
			return err
		}
		c, err := d.store.Sandbox(name).Agent(ctx)
		if err != nil {
			return err
		}
		out, err := sh(ctx, c, look)
		c.Close()
		if err != nil {
			return err
		}
		seen[i] = strings.Split(out, "\n")
	}
	const items = 4
	d.result.DistinctEntropy = len(seen[0]) == items && len(seen[1]) == items
	for i := range min(len(seen[0]), len(seen[1])) {
		if seen[0][i] == "" || seen[0][i] == seen[1][i] {
			d.result.DistinctEntropy = false
			d.say("both clones have %q", seen[0][i])
		}
	}
	return nil
}

func (d *demo) cleanUp(ctx context.Context) error {
	var errs []error
	for _, name := range d.vms {
		if err := d.store.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (d *demo) text(w io.Writer) {
	t := columns(w)
	r := d.result
	for _, row := range []struct{ stage, meaning string }{
		{"boot", "from nothing to an agent that answers"},
		{"pause", "the guest stands still"},
		{"save", "its memory and state are on disk"},
		{"gone", "from the command to the end of its process"},
		{"resume_entry", "from the call to the guest's first instruction"},
		{"resume_ready", "to an agent that answers, with clock and random numbers renewed"},
		{"wake", "the same, with starting a process and telling the caller"},
		{"ready_again", "resume_ready of the next wake"},
	} {
		if v, ok := r.StagesMs[row.stage]; ok {
			fmt.Fprintf(t, "%s\t%10.1f ms\t%s\n", row.stage, v, row.meaning)
		}
	}
	fmt.Fprintf(t, "bytes raw\t%10s\tmemory that is not zero\n", bytesText(int64(r.BytesRaw)))
	fmt.Fprintf(t, "bytes stored\t%10s\tthe same in the snapshot\n", bytesText(r.BytesStored))
	fmt.Fprintf(t, "faults\t%10d\tpages that the guest had to wait for\n", r.Faults)
	fmt.Fprintf(t, "memory touched\t%6.1f MiB\tof the snapshot, until the checks were done\n", r.MiBTouched)
	fmt.Fprintln(t)
	for _, row := range []struct {
		what string
		ok   bool
	}{
		{"asleep: no process", r.ProcessGone},
		{"same python process (pid)", r.SamePID},
		{"same value in its memory", r.SameValue},
		{"same files", r.FilesOK},
		{fmt.Sprintf("clock right (error %.0f ms)", r.ClockErrorMs), r.ClockErrorMs < maxClockError},
		{"two clones of one snapshot differ in randomness", r.DistinctEntropy},
	} {
		word := "yes"
		if !row.ok {
			word = "NO"
		}
		fmt.Fprintf(t, "%s\t%s\n", row.what, word)
	}
	t.Flush()
}
