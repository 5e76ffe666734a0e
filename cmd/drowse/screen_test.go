//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"golang.org/x/sys/unix"
)

// openTerminal opens a terminal. shown closes it and returns what it has shown.
func openTerminal(t *testing.T) (tty *os.File, shown func() string) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	fd := int(master.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	if tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	read := make(chan string)
	go func() {
		b, _ := io.ReadAll(master) // ends with EIO once the terminal is closed
		read <- string(b)
	}()
	return tty, func() string {
		tty.Close()
		return <-read
	}
}

// onTerminal runs a command line with a terminal as stdout and stderr.
func onTerminal(t *testing.T, state string, args ...string) (code int, shown string) {
	t.Helper()
	tty, end := openTerminal(t)
	code = run(t.Context(), append([]string{"--state", state}, args...), tty, tty)
	return code, end()
}

// drives are texts that a terminal executes, or that look like other text.
var drives = []string{
	"\x1b]0;title\a", "\x1b[2J\x1b[H", "\x1b[6n", "over\rwritten", "\b\b", "\x7f", "\u009b31m", "\u202eevil\u202c", "\u2066x\u2069", "\x9b31m", "\xff\xfe", "\x0e", "\v\f",
}

// left returns the characters of a text that drive a terminal.
func left(shown string) (out []string) {
	for _, r := range strings.ReplaceAll(shown, "\r\n", "\n") { // the terminal itself turns "\n" into "\r\n"
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			out = append(out, fmt.Sprintf("%U", r))
		}
	}
	return out
}

func TestAttack_console_of_a_guest_drives_the_terminal(t *testing.T) {
	state := t.TempDir()
	writeVM(t, state, "a", strings.Repeat("a", 32), "")
	log := "first\r\n\tsecond: ü 世界\r\r\n" + strings.Join(drives, "|") + "\nlast: ü"
	if err := os.WriteFile(filepath.Join(state, "vms", "a", "console.log"), []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	code, shown := onTerminal(t, state, "logs", "a")
	if got := left(shown); code != 0 || len(got) > 0 {
		t.Errorf("exit status %d; these came to the terminal: %v", code, got)
	}
	if want := "first\r\n\tsecond: ü 世界\r\n"; !strings.HasPrefix(shown, want) || !strings.HasSuffix(shown, "\r\nlast: ü") {
		t.Errorf("text was not shown as it is: %q", shown)
	}
	if code, shown := onTerminal(t, state, "logs", "a", "--raw"); code != 0 || !strings.Contains(shown, strings.Join(drives, "|")[:20]) {
		t.Errorf("--raw: exit status %d, %q", code, shown)
	}
	if code, piped, _ := drowse(t, state, "logs", "a"); code != 0 || piped != log {
		t.Errorf("piped: exit status %d, %q", code, piped)
	}
}

func TestAttack_words_of_a_record_or_an_error_drive_the_terminal(t *testing.T) {
	state := t.TempDir()
	writeVM(t, state, "a", strings.Repeat("a", 32), "")
	path := filepath.Join(state, "vms", "a", "vm.json")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// JSON does not escape the first, which is not an ASCII control character.
	b = bytes.Replace(b, []byte(`"image":"app"`), []byte(`"image":"app\u009b31m\u001b[2J\u202e"`), 1)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"ps -a", "ps -a -o json", "ls", "ls -o json", "inspect a", "history", "top --once", "net", "logs \x1b[2J\u009b31m", "nothing\u202e"} {
		_, shown := onTerminal(t, state, strings.Fields(args)...)
		if got := left(shown); len(got) > 0 {
			t.Errorf("%q: these came to the terminal: %v", args, got)
		}
		if shown == "" {
			t.Errorf("%q shows nothing", args)
		}
	}
}

func TestScreen_shows_text_however_it_is_cut(t *testing.T) {
	const text, want = "ü世界\U0001f680\r\na\r\r\nb\x1bc\xe4", "ü世界\U0001f680\na\nb\uFFFDc\uFFFD"
	for size := 1; size < len(text); size++ {
		var out strings.Builder
		s := &screen{w: &out}
		for rest := text; rest != ""; {
			n := min(size, len(rest))
			if wrote, err := s.Write([]byte(rest[:n])); wrote != n || err != nil {
				t.Fatal(wrote, err)
			}
			rest = rest[n:]
		}
		endScreen(s)
		if got := out.String(); got != want {
			t.Errorf("in pieces of %d bytes: %q, want %q", size, got, want)
		}
	}
}

func TestScreen_is_for_terminals_alone(t *testing.T) {
	var b strings.Builder
	if onScreen(&b) != io.Writer(&b) || raw(&b) != io.Writer(&b) {
		t.Error("a writer that is no terminal was taken for one")
	}
	tty, shown := openTerminal(t)
	if s := onScreen(tty); raw(s) != io.Writer(tty) || !isTerminal(s) {
		t.Error("what is behind a screen is not the terminal")
	}
	shown()
}
