package guest_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/guest"
)

func TestServeSelf_answers_one_line_and_is_not_led_astray(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "self"))
	if err != nil {
		t.Fatal(err)
	}
	var asked, after []string
	var wg sync.WaitGroup
	wg.Go(func() {
		guest.ServeSelf(l, func(r guest.SelfRequest) (guest.SelfAnswer, func()) {
			asked = append(asked, r.Do)
			if r.Note == "fail" {
				return guest.SelfAnswer{Error: strings.Repeat("\x01", 1<<20)}, nil
			}
			return guest.SelfAnswer{OK: true}, func() { after = append(after, r.Do) }
		})
	})
	for _, tt := range []struct {
		name, say string
		answer    string // "" means an end without an answer
	}{
		{"a request", `{"do":"sleep"}` + "\n", `{"ok":true}`},
		{"a request with more behind it", `{"do":"sleep"}` + "\n" + strings.Repeat("x", 10<<10), `{"ok":true}`},
		{"one that fails with a long word", `{"do":"snapshot","note":"fail"}` + "\n", `{"ok":false`},
		{"no request", "hello\n", `{"ok":false`},
		{"a line that does not end", strings.Repeat("x", 100<<10), ""},
		{"nothing", "", ""},
	} {
		c, err := net.Dial("unix", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, tt.say) // the server may cut it off
		_ = c.(*net.UnixConn).CloseWrite()
		line, _ := bufio.NewReader(c).ReadString('\n')
		if !strings.HasPrefix(line, tt.answer) || tt.answer == "" && line != "" || len(line) > 4<<10 {
			t.Errorf("%s: answered with %d bytes: %.100q", tt.name, len(line), line)
		}
		if line != "" && !json.Valid([]byte(line)) {
			t.Errorf("%s: the answer is no JSON", tt.name)
		}
		c.Close()
	}
	l.Close()
	wg.Wait()
	if strings.Join(asked, " ") != "sleep sleep snapshot" || strings.Join(after, " ") != "sleep sleep" {
		t.Errorf("asked %q, afterwards %q", asked, after)
	}
}
