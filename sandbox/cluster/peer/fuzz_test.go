package peer

import "testing"

// A host of the cluster may be hostile, and whoever has its key.
func FuzzPassed(f *testing.F) {
	is := Passed{Service: "api", Sandbox: "box", Caller: Caller{Name: "ci", Scopes: []string{"read"}}, Client: "192.0.2.1:1", Nonce: "n"}
	text, err := is.encode()
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{text, "", "e30=", "bm90IGpzb24="} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := decodePassed(text)
		if err != nil {
			return
		}
		if again, err := p.encode(); err == nil {
			if q, err := decodePassed(again); err != nil || q.Sandbox != p.Sandbox || q.Caller.Owner != p.Caller.Owner {
				t.Errorf("%+v became %+v, %v", p, q, err)
			}
		}
	})
}
