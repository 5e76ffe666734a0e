package lifetime

import (
	"errors"
	"strings"
	"testing"
)

func TestPersist_is_checked(t *testing.T) {
	long := "/" + strings.Repeat("a", MaxPersistPath)
	out := func(p, to string) Promotion { return Promotion{Path: p, To: to} }
	var drops []string
	var promotions []Promotion
	for i := range MaxDrops + 1 {
		drops = append(drops, "/d"+strings.Repeat("x", i))
		promotions = append(promotions, out("/d"+strings.Repeat("x", i), "/o"))
	}
	var large []string
	for i := range 5 {
		large = append(large, "/"+strings.Repeat(string(rune('a'+i)), 1000))
	}
	for _, tt := range []struct {
		name string
		p    Persist
		want string // of the error; "" for none
	}{
		{"nothing", Persist{}, ""},
		{"all of it", Persist{Drop: []string{"/var/cache", "/work/out"}, Promote: []Promotion{out("/work/out", "/srv/a"), out("/root/log.txt", "/srv/a")}, MaxBytes: 1}, ""},
		{"the same to two places", Persist{Promote: []Promotion{out("/a", "/x"), out("/a", "/y")}}, ""},
		{"names that begin alike", Persist{Promote: []Promotion{out("/a", "/x"), out("/ab", "/x")}, Drop: []string{"/runner", "/devices"}}, ""},
		{"a relative path to drop", Persist{Drop: []string{"cache"}}, "absolute"},
		{"no path", Persist{Drop: []string{""}}, "absolute"},
		{"an unclean path", Persist{Drop: []string{"/a/../b"}}, "absolute"},
		{"a slash at the end", Persist{Drop: []string{"/a/"}}, "absolute"},
		{"the root", Persist{Drop: []string{"/"}}, "root"},
		{"a path of two lines", Persist{Drop: []string{"/a\nb"}}, "printable"},
		{"a path that is no text", Persist{Drop: []string{"/a\xff"}}, "printable"},
		{"a path that is too long", Persist{Drop: []string{long}}, "1025 bytes"},
		{"what is no disk's", Persist{Drop: []string{"/proc/sys"}}, "/proc"},
		{"one path twice", Persist{Drop: []string{"/a", "/a"}}, "twice"},
		{"too many directories", Persist{Drop: drops}, "33 directories"},
		{"too many promotions", Persist{Promote: promotions[:MaxPromotions+1]}, "17 paths"},
		{"paths that are too long together", Persist{Drop: large}, "together"},
		{"a relative host directory", Persist{Promote: []Promotion{out("/a", "out")}}, "absolute"},
		{"the host's root", Persist{Promote: []Promotion{out("/a", "/")}}, "root"},
		{"one in the other", Persist{Promote: []Promotion{out("/a/b", "/x"), out("/a", "/x")}}, "has the other"},
		{"less than nothing", Persist{MaxBytes: -1}, "-1 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.p.Check()
			if tt.want == "" && err != nil || tt.want != "" && (!errors.Is(err, ErrKeep) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestPersist_knows_which_dropped_directories_are_promoted(t *testing.T) {
	p := Persist{Promote: []Promotion{{"/work/out", "/x"}}}
	for drop, want := range map[string]bool{
		"/work/out": true, "/work": true, "/work/out/deep": true, "/work/other": false, "/work/output": false, "/w": false,
	} {
		if got := p.Promoted(drop); got != want {
			t.Errorf("%s: %v, want %v", drop, got, want)
		}
	}
}

func TestParsePromotion(t *testing.T) {
	for text, want := range map[string]Promotion{
		"/a=/b": {"/a", "/b"}, "/a=/b=c": {"/a", "/b=c"}, "": {}, "/a": {}, "=/b": {}, "/a=": {},
	} {
		got, err := ParsePromotion(text)
		if got != want || (err == nil) != (want != Promotion{}) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}
