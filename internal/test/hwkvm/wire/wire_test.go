package wire

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
)

func TestResultStatus(t *testing.T) {
	for _, c := range []struct {
		name string
		in   Result
		want int
	}{
		{"success is 0", Result{}, 0},
		{"an exit code is passed on", Result{Code: 3}, 3},
		{"the largest exit code is passed on", Result{Code: 255}, 255},
		{"a signal is 128 plus its number", Result{Signal: 9}, 137},
		{"an error of init is 125", Result{Error: "mount"}, 125},
		{"a missing program is 127", Result{Error: "no file", NotFound: true}, 127},
		{"a file that is no program is 126", Result{Error: "denied", NotExecutable: true}, 126},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := c.in.Status(); got != c.want {
				t.Errorf("Status of %+v is %d, want %d", c.in, got, c.want)
			}
		})
	}
}

func TestFrames_arrive_as_they_were_sent(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	payloads := [][]byte{nil, {0, 255, '\n', 4}, bytes.Repeat([]byte{7}, MaxPayload)}
	for _, p := range payloads {
		if err := w.Send(Stdout, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.SendUint32(Signal, 15); err != nil {
		t.Fatal(err)
	}
	r := NewReader(&buf)
	for _, p := range payloads {
		typ, got, err := r.Next()
		if err != nil || typ != Stdout || !bytes.Equal(got, p) {
			t.Fatalf("got type %d, %d bytes, error %v; want type %d, %d bytes", typ, len(got), err, Stdout, len(p))
		}
	}
	_, p, err := r.Next()
	if err != nil {
		t.Fatal(err)
	}
	if n, err := Uint32(p); n != 15 || err != nil {
		t.Errorf("number is %d, error %v; want 15", n, err)
	}
	if _, _, err := r.Next(); err != io.EOF {
		t.Errorf("after the last frame the error is %v, want io.EOF", err)
	}
}

func TestReaderRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		in   string
		want error
	}{
		{"a length over the limit", "\x11\x01\x00\x01\x00", ErrFrame},
		{"the largest length there is", "\x11\xff\xff\xff\xff", ErrFrame},
		{"a header cut short", "\x11\x01", io.ErrUnexpectedEOF},
		{"a payload cut short", "\x11\x02\x00\x00\x00a", io.ErrUnexpectedEOF},
		{"a payload that is not there", "\x11\x02\x00\x00\x00", io.ErrUnexpectedEOF},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, _, err := NewReader(strings.NewReader(c.in)).Next(); !errors.Is(err, c.want) {
				t.Errorf("error is %v, want %v", err, c.want)
			}
		})
	}
}

func TestWriter_refuses_a_payload_over_the_limit(t *testing.T) {
	var buf bytes.Buffer
	if err := NewWriter(&buf).Send(Stdout, make([]byte, MaxPayload+1)); !errors.Is(err, ErrFrame) || buf.Len() != 0 {
		t.Errorf("error %v and %d bytes sent, want ErrFrame and none", err, buf.Len())
	}
}

func TestCommand_of_many_frames_arrives_whole(t *testing.T) {
	want := Command{Args: []string{"a", strings.Repeat("x", 3*MaxPayload), "\x00\n"}, Env: []string{"A=ü"}, Dir: "/", Time: 1 << 62}
	var buf bytes.Buffer
	if err := NewWriter(&buf).SendCommand(want); err != nil {
		t.Fatal(err)
	}
	got, err := NewReader(&buf).Command()
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("the command that arrived differs, or error %v", err)
	}
}

func TestCommand_over_the_limit_is_refused(t *testing.T) {
	var buf bytes.Buffer
	err := NewWriter(&buf).SendCommand(Command{Args: []string{strings.Repeat("x", MaxRequest)}})
	if !errors.Is(err, ErrFrame) || buf.Len() != 0 {
		t.Errorf("error %v and %d bytes sent, want ErrFrame and none", err, buf.Len())
	}
	w := NewWriter(&buf)
	for range MaxRequest/MaxPayload + 1 {
		if err := w.Send(Request, make([]byte, MaxPayload)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := NewReader(&buf).Command(); !errors.Is(err, ErrFrame) {
		t.Errorf("reading one gives %v, want ErrFrame", err)
	}
}
