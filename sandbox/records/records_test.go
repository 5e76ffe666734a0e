package records

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

func TestFilters_are_checked(t *testing.T) {
	for name, f := range map[string]Filter{
		"a page too long":       {Limit: MaxPage + 1},
		"a page of less than 0": {Limit: -1},
		"an owner too long":     {Owner: strings.Repeat("x", MaxOwner+1)},
		"an owner in two lines": {Owner: "a\nb"},
		"no class":              {Class: "eternal"},
		"no status":             {Statuses: []Status{"dead"}},
		"too many tags":         {Tags: slices.Repeat([]string{"x"}, MaxTags+1)},
		"an empty tag":          {Tags: []string{""}},
		"a tag of two":          {Tags: []string{"a,b"}},
		"after a long name":     {After: strings.Repeat("x", 100)},
	} {
		if err := f.Check(); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
		}
	}
	for _, limit := range []int{-1, MaxPage + 1} {
		if err := (Span{Limit: limit}).Check(); !errors.Is(err, ErrInvalid) {
			t.Errorf("a span of %d: got %v, want ErrInvalid", limit, err)
		}
	}
}

func TestPages_together_are_what_matches(t *testing.T) {
	now := time.Unix(1000, 0)
	var all []Sandbox
	for i := range 60 {
		s := Sandbox{
			Name: fmt.Sprintf("s%02d", i), Owner: []string{"", "build", "tests"}[i%3], Class: lifetime.Classes[i%len(lifetime.Classes)],
			Status: Statuses[i%(len(Statuses)-1)], Tags: []string{"a", "b", "c"}[:i%4],
		}
		if i%5 == 0 {
			s.Expires = now.Add(time.Duration(i-30) * time.Second).UTC()
		}
		all = append(all, s.At(now))
	}
	n := 0
	for _, owner := range []string{"", "build", "nobody"} {
		for _, class := range []lifetime.Class{"", lifetime.Ephemeral} {
			for _, tags := range [][]string{nil, {"a"}, {"a", "b"}} {
				for _, statuses := range [][]Status{nil, {Expired}, {Asleep, Running}} {
					for _, limit := range []int{0, 1, 7} {
						f := Filter{Owner: owner, Class: class, Tags: tags, Statuses: statuses, Limit: limit}
						var want, got []string
						for _, s := range all {
							if f.Matches(s) {
								want = append(want, s.Name)
							}
						}
						for {
							p := PageOf(all, f)
							for _, s := range p.Sandboxes {
								got = append(got, s.Name)
							}
							if limit > 0 && len(p.Sandboxes) > limit {
								t.Errorf("%+v: a page has %d", f, len(p.Sandboxes))
							}
							if f.After = p.Next; f.After == "" {
								break
							}
						}
						if !slices.Equal(got, want) {
							t.Errorf("%+v: the pages have %q, want %q", f, got, want)
						}
						n += len(got)
					}
				}
			}
		}
	}
	if n < 500 {
		t.Errorf("only %d rows were compared", n)
	}
}

func TestPart_of_a_history_has_the_newest_before_a_time(t *testing.T) {
	at := func(n int) time.Time { return time.Unix(int64(n), 0) }
	for name, tt := range map[string]struct {
		span  Span
		n     int
		first int
		len   int
	}{
		"nothing":              {Span{}, 0, 0, 0},
		"fewer than the limit": {Span{Limit: 10}, 3, 2, 3},
		"more than the limit":  {Span{Limit: 10}, 30, 29, 10},
		"no limit is said":     {Span{}, 5000, 4999, DefaultPage},
		"the most":             {Span{Limit: MaxPage}, 5000, 4999, MaxPage},
		"before a time":        {Span{Limit: 10, Before: at(20)}, 30, 19, 10},
		"before all":           {Span{Before: at(0)}, 30, 0, 0},
	} {
		p := Part[int]{Span: tt.span, At: at}
		for i := range tt.n {
			p.Add(i)
		}
		got := p.Newest()
		if len(got) != tt.len || got == nil || len(p.all) >= 2*MaxPage {
			t.Errorf("%s: %d entries of %d that are remembered, want %d", name, len(got), len(p.all), tt.len)
		}
		for i, n := range got {
			if n != tt.first-i {
				t.Errorf("%s: entry %d is %d, want %d", name, i, n, tt.first-i)
				break
			}
		}
	}
}

func TestCommand_that_is_too_long_is_cut(t *testing.T) {
	long := strings.Repeat("\x01ü", 1<<14)
	r := Run{Command: slices.Repeat([]string{long}, 2*maxArgs), User: long}.Bounded()
	if n := len(strings.Join(r.Command, "")); n == 0 || n > maxCommand || len(r.User) > MaxOwner {
		t.Errorf("%d bytes of arguments and %d of the user are left", n, len(r.User))
	}
	if r = (Run{Command: slices.Repeat([]string{"x"}, 2*maxArgs)}).Bounded(); len(r.Command) != maxArgs {
		t.Errorf("%d arguments are left, want %d", len(r.Command), maxArgs)
	}
	if r = (Run{}).Bounded(); r.Command == nil {
		t.Error("no command is null in JSON")
	}
}
