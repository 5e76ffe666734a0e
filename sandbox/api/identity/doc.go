// Package identity admits callers for whom others vouch: OpenID Connect issuers, by signed JSON Web Tokens, and
// certificate authorities, by TLS client certificates. A file has the rules by which an identity gets an owner and
// scopes. What no rule names gets nothing.
package identity
