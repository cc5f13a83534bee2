// castiron emit --kernel gemm_few --shape 16x64 --codec q5_0 --tokens 2 --numerics fast --isa avx2 --threads 2
// 369 lines, sha256 8c5602c632508c171f3056d1a87d32747813c200cdeab65f40192a7cfb91558c
            %19:2 = scf.for %16 = %c0 to %c2 step %c1 iter_args(%17 = %c5, %18 = %c5) -> (vector<8xf32>, vector<8xf32>) {
              %20 = arith.addi %16, %c6 : index
              %21 = arith.divui %20, %c2 : index
              %22 = arith.remui %20, %c2 : index
              %23 = arith.addi %10, %21 : index
              memref.prefetch %m3[%23, %22, %c0], read, locality<3>, data : memref<1x2x352xi8>
              %24 = arith.addi %10, %21 : index
              memref.prefetch %m3[%24, %22, %c7], read, locality<3>, data : memref<1x2x352xi8>
              %25 = arith.addi %10, %21 : index
              memref.prefetch %m3[%25, %22, %c8], read, locality<3>, data : memref<1x2x352xi8>
              %26 = arith.addi %10, %21 : index
              memref.prefetch %m3[%26, %22, %c9], read, locality<3>, data : memref<1x2x352xi8>
              %27 = arith.addi %10, %21 : index
              memref.prefetch %m3[%27, %22, %c10], read, locality<3>, data : memref<1x2x352xi8>
              %28 = arith.addi %10, %21 : index
              memref.prefetch %m3[%28, %22, %c11], read, locality<3>, data : memref<1x2x352xi8>
              %29 = arith.muli %9, %c3 : index
              %30 = vector.load %m3[%10, %16, %29] : memref<1x2x352xi8>, vector<16xi8>
              %31 = vector.bitcast %30 : vector<16xi8> to vector<8xf16>
              %32 = arith.extf %31 : vector<8xf16> to vector<8xf32>
              %33 = arith.mulf %32, %c12 : vector<8xf32>
              %34 = arith.addi %14, %c1 : index
              %35 = memref.load %m2[%14, %16] : memref<2x2xi32>
              %36 = arith.muli %35, %c13 : i32
              %37 = vector.broadcast %36 : i32 to vector<8xi32>
              %38 = memref.load %m2[%34, %16] : memref<2x2xi32>
              %39 = arith.muli %38, %c13 : i32
              %40 = vector.broadcast %39 : i32 to vector<8xi32>
              %41 = arith.muli %9, %c14 : index
              %42 = arith.addi %c14, %41 : index
              %43 = vector.load %m3[%10, %16, %42] : memref<1x2x352xi8>, vector<32xi8>
              %44 = vector.bitcast %43 : vector<32xi8> to vector<8xi32>
              %45 = arith.andi %44, %c15 : vector<8xi32>
              %46 = arith.shrui %44, %c16 : vector<8xi32>
              %47 = arith.andi %46, %c17 : vector<8xi32>
              %48 = arith.shrui %44, %c18 : vector<8xi32>
              %49 = arith.andi %48, %c19 : vector<8xi32>
              %50 = arith.muli %9, %c14 : index
              %51 = arith.addi %c20, %50 : index
              %52 = vector.load %m3[%10, %16, %51] : memref<1x2x352xi8>, vector<32xi8>
// 210 lines more
              %263 = arith.addi %231, %262 : vector<16xi16>
              %264 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%263, %c36) : (vector<16xi16>, vector<16xi16>) -> vector<8xi32>
              %265 = arith.addi %148, %264 : vector<8xi32>
              %266 = arith.sitofp %258 : vector<8xi32> to vector<8xf32>
              %267 = arith.sitofp %265 : vector<8xi32> to vector<8xf32>
              %268 = arith.mulf %266, %32 : vector<8xf32>
              %269 = memref.load %m1[%14, %16] : memref<2x2xf32>
              %270 = vector.broadcast %269 : f32 to vector<8xf32>
              %271 = math.fma %268, %270, %17 : vector<8xf32>
              %272 = arith.mulf %267, %32 : vector<8xf32>
              %273 = memref.load %m1[%34, %16] : memref<2x2xf32>
              %274 = vector.broadcast %273 : f32 to vector<8xf32>
              %275 = math.fma %272, %274, %18 : vector<8xf32>
              scf.yield %271, %275 : vector<8xf32>, vector<8xf32>
            }
