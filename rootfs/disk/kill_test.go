package disk

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
)

const childEnv = "DROWSE_DISK_TEST_CHILD"

// TestMain turns the test binary into the child of the SIGKILL test when the environment says so.
func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		if err := writeForEver(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// killBlocks is the number of blocks that the child writes to, in turn. They straddle an index chunk.
const killBlocks = 64

func killOffset(i int64) int64 { return (chunkBlocks - killBlocks/2 + i) * BlockSize }

// writeForEver writes numbered versions to the disk in dir, block after block. It prints the version to stdout
// before ("b") and after ("a") each write. From time to time it seals and flushes.
func writeForEver(dir string) error {
	s, err := readStack(dir)
	if err != nil {
		return err
	}
	d, err := Open(s, Options{})
	if errors.Is(err, ErrSealed) {
		if s, err = Fork(filepath.Join(dir, "fork-"+strconv.Itoa(os.Getpid())), s, 0); err != nil {
			return err
		}
		d, err = Open(s, Options{})
	}
	if err != nil {
		return err
	}
	if err := writeStack(dir, s); err != nil {
		return err
	}
	start, err := strconv.ParseUint(os.Getenv(childEnv+"_NEXT"), 10, 64)
	if err != nil {
		return err
	}
	p := make([]byte, BlockSize)
	for v := start; ; v++ {
		i := int64(v*v+v/7) % killBlocks
		off, n := killOffset(i), int64(BlockSize)
		if v%5 == 0 {
			off, n = off+512*int64(v%7), 512
		}
		for j := int64(0); j < n; j += sectorSize {
			stamp(p[j:], (off+j)/sectorSize, v)
		}
		fmt.Printf("b %d %d %d\n", v, off, n)
		f, fileOff, length, err := d.WriteExtent(off, n)
		if err == nil && length != n {
			err = fmt.Errorf("extent of %d bytes for %d", length, n)
		}
		if err != nil {
			return err
		}
		_, err = f.WriteAt(p[:n], fileOff)
		if err := d.Wrote(off, n, err); err != nil {
			return err
		}
		fmt.Printf("a %d %d %d\n", v, off, n)
		switch {
		case v%97 == 0:
			next := filepath.Join(dir, fmt.Sprintf("layer-%d", v))
			if _, err := d.Seal(context.Background(), next); err != nil {
				return err
			}
			if err := writeStack(dir, d.Stack()); err != nil {
				return err
			}
		case v%41 == 0:
			if err := d.Flush(); err != nil {
				return err
			}
		}
	}
}

func readStack(dir string) (s Stack, err error) {
	f, err := os.Open(filepath.Join(dir, "stack"))
	if err != nil {
		return s, err
	}
	defer func() { _ = f.Close() }() // only read from
	for sc := bufio.NewScanner(f); sc.Scan(); {
		s.Layers = append(s.Layers, sc.Text())
	}
	return s, nil
}

func writeStack(dir string, s Stack) error {
	text := ""
	for _, l := range s.Layers {
		text += l + "\n"
	}
	tmp := filepath.Join(dir, "stack.tmp")
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, "stack"))
}

// TestKilled_process_loses_no_finished_write kills a writing child at varying moments, many times over the same
// disk, and reads the disk as the next process would.
func TestKilled_process_loses_no_finished_write(t *testing.T) {
	if hostBoot() == [bootIDSize]byte{} {
		t.Skip("no /proc/sys/kernel/random/boot_id, by which the page cache of a killed process is believed")
	}
	dir := t.TempDir()
	s, err := Create(filepath.Join(dir, "layer"), modelSize)
	must(t, err)
	must(t, writeStack(dir, s))
	m := model{}
	next := uint64(1)
	writes := 0
	for round := range *killRounds {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+dir, childEnv+"_NEXT="+strconv.FormatUint(next, 10))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		in := bufio.NewReader(out)
		first, err := in.ReadString('\n') // from here on it writes, however long its start took
		must(t, err)
		timer := time.AfterFunc(time.Duration(20+round*7%60)*time.Millisecond, func() { _ = cmd.Process.Kill() })
		lines, err := io.ReadAll(in)
		must(t, err)
		lines = append([]byte(first), lines...)
		_ = cmd.Wait() // the test has killed it
		timer.Stop()
		var what string
		var v uint64
		var off, n int64
		for rest := lines; len(rest) > 0; {
			i := 0
			for i < len(rest) && rest[i] != '\n' {
				i++
			}
			if i == len(rest) {
				break // the last line is incomplete
			}
			if _, err := fmt.Sscanf(string(rest[:i]), "%s %d %d %d", &what, &v, &off, &n); err != nil {
				t.Fatalf("child said %q: %v", rest[:i], err)
			}
			m.put(off, n, v, what == "b")
			next = v + 1
			writes++
			rest = rest[i+1:]
		}
		s, err := readStack(dir)
		must(t, err)
		// Read with this boot id. Another one means a power loss, for which only flushed data counts.
		d, err := env{fs: osfile.OS, boot: hostBoot()}.open(s, Options{ReadOnly: true})
		must(t, err)
		for i := range int64(killBlocks) {
			p := make([]byte, BlockSize)
			_, err := d.ReadAt(p, killOffset(i))
			must(t, err)
			for j := int64(0); j < BlockSize; j += sectorSize {
				sec := (killOffset(i) + j) / sectorSize
				got, ok := versionOf(p[j:], sec)
				want := m.get(sec)
				if !ok || !slices.Contains(want, got) {
					t.Fatalf("round %d: sector %d has version %d (whole: %v), want one of %v", round, sec, got, ok, want)
				}
				m[sec] = []uint64{got}
			}
		}
		must(t, d.Close())
	}
	t.Logf("%d writes over %d kills", writes/2, *killRounds)
	if writes < *killRounds {
		t.Errorf("only %d lines from the child", writes)
	}
}
