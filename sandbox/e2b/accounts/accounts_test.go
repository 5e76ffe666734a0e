package accounts

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func FuzzPath(f *testing.F) {
	for _, s := range []string{"", "~", "~/a", "a/../../b", "/etc/../x", "~user", "a\x00b", "//", "."} {
		f.Add(s)
	}
	u := Account{Name: "user", UID: 1000, GID: 1000, Home: "/home/user"}
	f.Fuzz(func(t *testing.T, name string) {
		if got, err := u.Path(name); err == nil && (!strings.HasPrefix(got, "/") || strings.Contains(got+"/", "/../") || strings.ContainsRune(got, 0)) {
			t.Fatalf("%q is %q", name, got)
		}
	})
}

func FuzzAccounts(f *testing.F) {
	f.Add([]byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::home:/bin/sh\n"))
	f.Add([]byte(":::::\nx:1:99999999999:1::/:\n\xff:x:1:1::/a/../b:"))
	f.Fuzz(func(t *testing.T, data []byte) {
		a := empty()
		a.addUsers(strings.ToValidUTF8(string(data), "?"))
		a.addGroups(strings.ToValidUTF8(string(data), "?"))
		for name, u := range a.byName {
			if name == "" || !utf8.ValidString(name) || !strings.HasPrefix(u.Home, "/") {
				t.Fatal(u)
			}
		}
	})
}
