"""SGLang seen from outside: started, asked, and pooled behind routers."""
